"""Output of commands: lines on stdout and stderr, progress bars, and hints on how to resume."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from typer import Exit

console = Console()
errors = Console(stderr=True)


def say(*lines: str, end: str = "\n") -> None:
    """Print lines of plain text on stdout, without markup or wrapping."""
    tell(console, *lines, end=end)


def complain(text: str) -> None:
    """Print plain text on stderr."""
    tell(errors, text)


def tell(target: Console, *lines: str, end: str = "\n") -> None:
    """Print lines of plain text on a console, without markup or wrapping."""
    target.print(*lines, sep="\n", end=end, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(first: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr, if stderr is a terminal.

    Args:
        first: The description of the first stage.

    Yields:
        A function `show(stage, completed, total)`, which moves the bar to the share
        `completed / total` of a stage. The function begins a stage if its description is new.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(escape(first), total=None)

        def show(stage: str, completed: float = 0, total: float | None = None) -> None:
            if bar.tasks[0].description != escape(stage):
                bar.reset(task, description=escape(stage))
            bar.update(task, completed=completed, total=total)

        yield show


def report_unhelped(method: str, result: Mapping[str, Any]) -> None:
    """Print the clients whose best model is the untrained base, if there are any."""
    if names := [name for name, round in result.get("kept", {}).items() if round == 0]:
        say(
            f"Training with {method} did not help {', '.join(names)}: no round scored better on "
            "the validation text than the untrained base, which was therefore kept."
        )


def plugin_options(plugins: Mapping[str, Mapping[str, str]]) -> str:
    """Return the --plugin options for the plugins recorded in run.json."""
    files = dict.fromkeys(plugin["file"] for plugin in plugins.values())
    return "".join(f" --plugin {file}" for file in files)


def exit_stopped(hint: str) -> NoReturn:
    """Exit from a command that was interrupted, with a hint on how to resume."""
    complain(f"Stopped. {hint}")
    raise Exit(130) from None


@contextmanager
def stoppable(folder: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C inside the `with` block into an exit with a hint on how to resume.

    Args:
        folder: The run folder to resume. If there is no folder, or if it does not contain a run
            yet, the hint says to repeat the command.
    """
    try:
        yield
    except KeyboardInterrupt:
        command = "the same command"
        if folder is not None and (folder / "run.json").exists():
            from coterie.runs.read import Plugins, read_json

            run = read_json(folder, "run.json", Plugins)
            plugins = run.get("plugins", {})  # runs of earlier versions have none
            command = f"`coterie run --resume {folder}{plugin_options(plugins)}`"
        exit_stopped(f"Finished rounds are saved; resume with {command}.")

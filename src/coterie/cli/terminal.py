"""How commands speak: to the console, about errors, and when they are stopped."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def say(*lines: str, end: str = "\n") -> None:
    """Print lines of plain text as they are, whatever the width."""
    tell(console, *lines, end=end)


def complain(text: str) -> None:
    """Print it where errors go."""
    tell(errors, text)


def tell(where: Console, *lines: str, end: str = "\n") -> None:
    """Print lines of plain text on a console."""
    where.print(*lines, sep="\n", end=end, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress(first: str) -> Iterator[tuple[Callable[[str], None], Callable[[float, float], None]]]:
    """Show progress where errors go, if that is a terminal; `first`: the name of what begins.

    Yields one function for the name of what begins next, and one for how much of how much is done.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task(escape(first), total=None)
        yield (
            lambda name: bar.reset(task, description=escape(name), total=None),
            lambda done, of: bar.update(task, completed=done, total=of),
        )


def tell_unhelped(method: str, result: Mapping[str, Any]) -> None:
    """Name the clients that end with the base as it came, where a run's result has any."""
    if names := [name for name, round in result.get("kept", {}).items() if round == 0]:
        say(
            f"Training with {method} did not help {', '.join(names)}: no round did better "
            "on validation text than the base, which is kept as it came."
        )


def plugin_options(plugins: Mapping[str, Mapping[str, str]]) -> str:
    """What a command needs to know the plugins of a run, as run.json has them."""
    files = dict.fromkeys(plugin["file"] for plugin in plugins.values())
    return "".join(f" --plugin {file}" for file in files)


def stopped(how: str) -> NoReturn:
    """End a command that was stopped, saying how to go on."""
    complain(f"Stopped. {how}")
    raise typer.Exit(130) from None


@contextmanager
def stoppable(folder: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says how to go on with the run in a folder, if there is one.

    Without a folder, the same command goes on.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command"
        if folder is not None and (folder / "run.json").exists():
            from coterie.runs.read import Plugins, read_json

            began = read_json(folder, "run.json", Plugins)
            plugins = began.get("plugins", {})  # runs of earlier versions have none
            again = f"`coterie run --resume {folder}{plugin_options(plugins)}`"
        stopped(f"Finished rounds are saved; resume with {again}.")

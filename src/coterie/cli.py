"""The command line: `coterie run`, `compare`, `methods`, `audit`, `generate`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coterie.errors import CoterieError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models together and personally: the text never leaves its machine.",
)
console = Console()
errors = Console(stderr=True)
_debug = False


def _remember_debug(value: bool) -> bool:
    global _debug
    _debug = value
    return value


RunFile = Annotated[
    Path | None, typer.Argument(help="A run file (YAML); without one, the embedded demo.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the run file: training.batch=4. Repeatable."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", callback=_remember_debug, help="Show the traceback of an error."),
]


@app.command()
def run(
    file: RunFile = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder; default runs/NAME.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the stopped run in this folder.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a run in the folder.")] = False,
    debug: Debug = False,
) -> None:
    """Learn together: run a method and its baselines, and show each client's result.

    Without a file it runs the embedded demo: minutes on two cores, nothing to download. For a run
    of your own write a run file, such as

        method: comigs-1g1s
        rounds: 10
        clients:
          - {name: anna, path: anna.txt}
          - {name: ben, path: ben-notes/}

    and start it, with any of its keys changed by --set:

        coterie run mine.yaml --set training.batch=8 --set seed=1

    docs/run-file.md explains every key; `coterie methods` lists what `method` can be.
    """
    from coterie import api
    from coterie.config import load_config
    from coterie.runs import ConsoleWatch

    watch = partial(ConsoleWatch, console)
    if resume is not None:
        if file is not None or settings or out is not None or force:
            raise CoterieError(
                "A run continues as it began: --resume takes no run file, --set, --out or --force."
            )
        with _stoppable(resume):
            finished = api.resume(resume, watch=watch)
    else:
        config = load_config(file, settings or ())
        folder = out or Path("runs") / config.name
        with _stoppable(folder):
            finished = api.run(config, out=folder, force=force, watch=watch)
    client = min(next(iter(finished.results.values()))["trained"])
    console.print(finished.table())
    _say(f"\nThe run is in {finished.path}. Write with a client's model:")
    _say(f'  coterie generate {finished.path} --client {client} --prompt "..."')


@app.command()
def compare(
    file: RunFile = None,
    methods: Annotated[
        str, typer.Option(help="Names, separated by commas; `coterie methods` lists them.")
    ] = "pretrained,local,fedavg,comigs-1g1s",
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method.")] = 1,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where runs are kept; default runs/compare-NAME.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare methods on the same data and base, over several seeds.

    Finished runs are kept and found again: stop it, start it again, or ask for more methods or
    seeds, and only what is new is run.

    Example:

        coterie compare mine.yaml --methods local,fedavg,comigs-1g1s --seeds 3
    """
    from coterie import api
    from coterie.config import load_config
    from coterie.runs import ConsoleWatch

    config = load_config(file, settings or ())
    folder = out or Path("runs") / f"compare-{config.name}"
    with _stoppable():
        comparison = api.compare(
            config,
            [name.strip() for name in methods.split(",") if name.strip()],
            seeds=seeds,
            out=folder,
            watch=partial(ConsoleWatch, console),
            report=_say,
        )
    console.print(comparison.table())
    _say(f"\nAlso in {folder}/compare.md and compare.json.")
    _say("For more methods or seeds ask again, with them: only what is new is run.")


@app.command()
def methods(
    name: Annotated[
        str | None, typer.Argument(help="Show this method's settings.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """List every method, its paper and what it shares; or one method's settings."""
    from coterie.report.settings import method_table, methods_table

    if name is None:
        console.print(methods_table())
        _say("\n`coterie methods NAME` shows a method's settings.")
        return
    console.print(method_table(name))
    _say(f"\nIn a run file:        method: {{name: {name}, KEY: VALUE}}")
    _say(f"On the command line:  --set method={name} --set method.KEY=VALUE")


@app.command()
def audit(file: RunFile = None, settings: Settings = None, debug: Debug = False) -> None:
    """Show everything that leaves a client in a round, and everything that never does.

    Read off the method's declaration and measured on the real messages of one short round.
    """
    from coterie.config import load_config
    from coterie.report.audit import audit_run

    for table in audit_run(load_config(file, settings or ())):
        console.print(table)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    client: Annotated[str, typer.Option(help="Whose model writes.")],
    prompt: Annotated[str, typer.Option(help="What it goes on from.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 80,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds write other texts.")] = 0,
    debug: Debug = False,
) -> None:
    """Write with a client's personal model.

    Example, after the demo:

        coterie generate runs/demo --client poet --prompt "I sing of"
    """
    from coterie.generation import write

    text = write(run, client, prompt, tokens, temperature, top_p, seed)
    _say(text)


def _say(text: str) -> None:
    """Print plain text as it is, whatever the width."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _stoppable(folder: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says how to go on with the run in a folder, if there is one.

    Without a folder, the same command goes on.
    """
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command"
        if folder is not None and (folder / "run.json").exists():
            again = f"`coterie run --resume {folder}`"
        _complain(f"Stopped. Finished rounds are kept; continue with {again}.")
        raise typer.Exit(130) from None


def _complain(text: str) -> None:
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def main() -> None:
    """Run a command; an error that the user can mend is one sentence and exit code 2."""
    try:
        app()
    except (CoterieError, OSError) as error:
        if _debug:
            raise
        text = str(error)
        if isinstance(error, OSError):
            text = f"{error.filename}: {error.strerror}." if error.filename else f"{error}."
        _complain(f"Error: {text}")
        sys.exit(2)

"""The command line: `coterie run`, `compare`, `methods`, `audit`, `generate`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from coterie.errors import CoterieError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Fine-tune language models together and personally: the text never leaves its machine.",
)
console = Console()
errors = Console(stderr=True)
_debug = False


def _remember_debug(value: bool) -> bool:
    global _debug
    _debug = _debug or value
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

    `coterie run` runs the embedded demo. `coterie run my.yaml --set rounds=5` runs your own.
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
    console.print(finished.table().rich())
    console.print(f"The run is in {finished.path}. Write with a client's model:", highlight=False)
    client = min(next(iter(finished.results.values()))["trained"])
    console.print(
        f'  coterie generate {finished.path} --client {client} --prompt "..."', highlight=False
    )


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
    """
    from coterie import api
    from coterie.config import load_config
    from coterie.runs import ConsoleWatch

    config = load_config(file, settings or ())
    folder = out or Path("runs") / f"compare-{config.name}"
    with _stoppable(None):
        comparison = api.compare(
            config,
            [name.strip() for name in methods.split(",") if name.strip()],
            seeds=seeds,
            out=folder,
            watch=partial(ConsoleWatch, console),
            report=partial(console.print, highlight=False),
        )
    console.print(comparison.table().rich())
    console.print(f"Also in {folder}/compare.md and compare.json.", highlight=False)


@app.command()
def methods(debug: Debug = False) -> None:
    """List every method, its paper, what it shares and its settings."""
    from coterie.methods import POOLED, available
    from coterie.report import Table

    rows = [[m.name, m.paper, m.summary] for m in available().values()]
    rows.append([POOLED, "", "one client that holds everybody's text: not private, an upper bound"])
    console.print(Table("Methods", ["name", "paper", "what travels"], rows).rich())
    console.print("A run file's `method` is a name, or a mapping with settings:", highlight=False)
    for method in available().values():
        for name, field in method.model_fields.items():
            default = escape(repr(field.default))
            about = escape(field.description or "")
            console.print(f"  [bold]{method.name}[/] {name} = {default}  {about}", highlight=False)


@app.command()
def audit(file: RunFile = None, settings: Settings = None, debug: Debug = False) -> None:
    """Show everything that leaves a client in a round, and everything that never does.

    Read off the method's declaration and measured on the real messages of one short round.
    """
    from coterie.config import load_config
    from coterie.report.audit import audit_run

    for table in audit_run(load_config(file, settings or ())):
        console.print(table.rich())


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
    """Write with a client's personal model."""
    from coterie.generation import write

    text = write(run, client, prompt, tokens, temperature, top_p, seed)
    console.print(text, highlight=False, markup=False)


@contextmanager
def _stoppable(folder: Path | None) -> Iterator[None]:
    """Turn Ctrl-C into a sentence that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"`coterie run --resume {folder}`" if folder else "the same command"
        errors.print(f"Stopped. Finished rounds are kept; continue with {again}.", highlight=False)
        raise typer.Exit(130) from None


def main() -> None:
    """Run a command; an error that the user can mend is one sentence and exit code 2."""
    try:
        app()
    except CoterieError as error:
        if _debug:
            raise
        errors.print(f"[red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:
        if _debug:
            raise
        what = f"{error.filename}: " if error.filename else ""
        errors.print(f"[red]Error:[/] {escape(what)}{error.strerror}", soft_wrap=True)
        sys.exit(2)

"""The command line; the commands of a deployment are in deploy.py and keys.py."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from coterie.cli.deploy import client, server
from coterie.cli.inspect import align
from coterie.cli.keys import keys_app
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
METHODS = "pretrained,local,fedavg,comigs-1g1s"
"""What `compare` compares unless it is told."""


def _remember_debug(value: bool) -> bool:
    global _debug
    _debug = value
    return value


RunFile = Annotated[
    Path | None,
    typer.Argument(
        help="A run file (YAML); without one, the embedded demo. `who-wrote-this` is an embedded "
        "one on instructions."
    ),
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
    engine: Annotated[
        Literal["local", "flower-simulation"] | None,
        typer.Option(
            help="local: clients work in turn, in this process; flower-simulation: in several "
            "processes of this machine. Default local, or as the run began.",
            show_default=False,
        ),
    ] = None,
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
    from coterie.data.templates import fields
    from coterie.runs import ConsoleWatch

    watch = partial(ConsoleWatch, console)
    if resume is not None:
        if file is not None or settings or out is not None or force:
            raise CoterieError(
                "A run continues as it began: --resume takes no run file, --set, --out or --force."
            )
        with _stoppable(resume):
            finished = api.resume(resume, watch=watch, engine=engine)
    else:
        config = load_config(file, settings or ())
        folder = out or Path("runs") / config.name
        with _stoppable(folder):
            finished = api.run(
                config, out=folder, force=force, watch=watch, engine=engine or "local"
            )
    client = min(next(iter(finished.results.values()))["trained"])
    console.print(finished.table())
    _say(f"\nThe run is in {finished.path}. Write with a client's model:")
    given = '--prompt "..."'
    if (instructions := finished.config.data.instructions) is not None:
        given = " ".join(f'--field {name}="..."' for name in fields(instructions.template))
    _say(f"  coterie generate {finished.path} --client {client} {given}")


@app.command()
def compare(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run file, or a table file (YAML); without one, the embedded demo."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Names, separated by commas; `coterie methods` lists them. Of a table: its rows' "
            f"names or methods. Default {METHODS}, or all rows.",
            show_default=False,
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(help="Of a table: only these columns; default all.", show_default=False),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs per method; default 1, or the table's.", show_default=False),
    ] = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where runs are kept; default runs/compare-NAME, of a table runs/FOLDER-NAME.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare methods on the same data and base, over several seeds; or reproduce a paper's table.

    Finished runs are kept and found again: stop it, start it again, or ask for more methods or
    seeds, and only what is new is run.

    Examples (docs/tables.md explains tables):

        coterie compare mine.yaml --methods local,fedavg,comigs-1g1s --seeds 3

        coterie compare recipes/small/comigs-table4.yaml --set data_root=FOLDER
    """
    from coterie import api
    from coterie.config import load_config
    from coterie.paper_tables import compare_table, is_table, table_folder
    from coterie.runs import ConsoleWatch

    watch = partial(ConsoleWatch, console)
    if file is not None and is_table(file):
        folder = out or table_folder(file)
        with _stoppable():
            shown = compare_table(
                file,
                settings=settings or (),
                methods=_listed(methods),
                columns=_listed(columns),
                seeds=seeds,
                out=folder,
                watch=watch,
                report=_say,
            )
        for table in shown.tables():
            console.print(table)
        _say(f"\nAlso in {folder}/table.md and table.json.")
        return
    if columns is not None:
        raise CoterieError("--columns chooses columns of a table file; a run file has none.")
    config = load_config(file, settings or ())
    folder = out or Path("runs") / f"compare-{config.name}"
    with _stoppable():
        comparison = api.compare(
            config,
            _listed(METHODS if methods is None else methods),
            seeds=seeds or 1,
            out=folder,
            watch=watch,
            report=_say,
        )
    console.print(comparison.table())
    _say(f"\nAlso in {folder}/compare.md and compare.json.")
    _say("For more methods or seeds ask again, with them: only what is new is run.")


def _listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]


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

    Read off the method's declaration and measured on the real messages of one short round. Where
    clients have no path, as in a deployment, a text of the demo stands in for theirs.
    """
    from coterie.config import load_with_any_text
    from coterie.report.audit import audit_run

    for table in audit_run(load_with_any_text(file, settings or ())):
        console.print(table)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Runs' folders, or folders that hold some."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Default: `report` in the first RUN.", show_default=False)
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            metavar="N|first|last",
            help="Colour texts by this layer's experts; default first and last.",
            show_default=False,
        ),
    ] = None,
    texts: Annotated[
        bool,
        typer.Option("--texts/--no-texts", help="Show clients' texts, with each expert's part."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Draw what runs have measured: one page that opens offline, and each figure as SVG and PNG.

    A run may still be in progress. Runs of the same method that differ in their seed are averaged.

    Example:

        coterie report runs/compare-mine --out report
    """
    try:
        from coterie.report.page import PRIVATE, write_report
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "jinja2"):
            raise
        raise CoterieError(
            f"Reports need {error.name}: install the extra, pip install 'coterie[report]'."
        ) from None

    written = write_report(runs, out or runs[0] / "report", texts, layer)
    for section in written.sections:
        _say(f"{section.experiment.name}: {len(section.pictures)} figures")
        for item in section.left_out:
            _say(f"  left out: {item.title}: {item.why}")
    if texts:
        _say(PRIVATE)
    _say(f"\nThe page is {written.page}; its figures are in {written.figures}.")


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    client: Annotated[str, typer.Option(help="Whose model writes.")],
    prompt: Annotated[
        str | None, typer.Option(help="What it goes on from.", show_default=False)
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="Instead of a prompt, in a run on instructions: a field of its template. "
            "Repeatable.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 80,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="0: the likeliest token. Default 0.8, with --field 0.",
            show_default=False,
        ),
    ] = None,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Other seeds write other texts.")] = 0,
    debug: Debug = False,
) -> None:
    """Write with a client's personal model.

    Example, after the demo:

        coterie generate runs/demo --client poet --prompt "I sing of"

    After a run on instructions it answers:

        coterie generate runs/mine --client anna --field instruction="Name a sea."
    """
    from coterie.cli.writing import Writing, answer, write

    if (prompt is None) == (not field):
        raise CoterieError("Give either --prompt, or --field NAME=TEXT for each field.")
    if temperature is None:
        temperature = 0.8 if prompt is not None else 0.0
    how = Writing(tokens, temperature, top_p, seed)
    if prompt is not None:
        _say(write(run, client, prompt, how))
        return
    fields: dict[str, str] = {}
    for given in field or ():
        name, equals, text = given.partition("=")
        if not equals or not name or name in fields:
            raise CoterieError(f"--field takes NAME=TEXT, each name once, not {given!r}.")
        fields[name] = text
    _say(answer(run, client, fields, how))


app.command()(align)
app.command()(server)
app.command()(client)
app.add_typer(keys_app, name="keys")


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
    except RuntimeError as error:
        if _debug or type(error).__name__ != "OutOfMemoryError":  # torch's; it is slow to import
            raise
        _complain("Error: the GPU has too little memory; a smaller training.batch needs less.")
        sys.exit(2)

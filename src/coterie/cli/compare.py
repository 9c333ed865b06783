"""The command `coterie compare`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, Settings
from coterie.errors import CoterieError

METHODS: list[str] = ["pretrained", "local", "fedavg", "comigs-1g1s"]
"""What is compared unless the command is told."""
TABLE_ONLY = ("--columns", "--regime", "--write-docs")
MethodNames = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated method names (see `coterie methods`). For a table file: "
        f"names or methods of its rows. Default: {', '.join(METHODS)}; for a table file, all.",
        show_default=False,
    ),
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUES",
        help="Try each method with these values: training.learning_rate=1e-4,5e-4,2e-3. The one "
        "that does best on the validation text, with the first seed, is then scored on the test "
        "text. Repeatable; all combinations are tried.",
        show_default=False,
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Row that the others are compared with. Default: the best.",
        show_default=False,
    ),
]
Regime = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="For a table file: one of its `regimes`, in which the whole table is run.",
        show_default=False,
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="For a table file: also save the results in this folder, as JSON and as a generated "
        "page with a picture.",
        show_default=False,
    ),
]


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run file or a table file (YAML). Default: the built-in demo."),
    ] = None,
    methods: MethodNames = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="For a table file: comma-separated columns to run. Default: all.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs per method. Default: 1, or the table's.", show_default=False
        ),
    ] = None,
    tune: Tune = None,
    against: Against = None,
    regime: Regime = None,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs. Default: runs/compare-NAME; for tables, runs/FOLDER-NAME, "
            "with -REGIME if one is given.",
            show_default=False,
        ),
    ] = None,
    write_docs: WriteDocs = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Compare methods on the same data and base over several seeds, or reproduce a paper's table.

    Finished runs are saved and reused: to continue after an interruption, or to add methods or
    seeds, run the command again.

    Examples (see docs/tables.md for table files):

        coterie compare mine.yaml --methods local,fedavg,comigs-1g1s --seeds 3

        coterie compare mine.yaml --tune training.learning_rate=1e-4,5e-4,2e-3

        coterie compare recipes/small/comigs-table4.yaml --set data_root=FOLDER
    """
    from coterie.config.tune import read_tune
    from coterie.config.values import read_values

    common = _Common(settings or (), read_tune(tune or ()), against, out)
    values = read_values(file, settings or ())
    if file is not None and {"rows", "shows"} & values.keys():
        _fill_in(file, _listed(methods), _listed(columns), seeds, regime, write_docs, common)
        return
    for option, value in zip(TABLE_ONLY, (columns, regime, write_docs), strict=True):
        if value is not None:
            raise CoterieError(f"{option} needs a table file; this is a run file.")
    _compare(values, METHODS if methods is None else _listed(methods), seeds or 1, common)


@dataclass(frozen=True)
class _Common:
    """What both kinds of files take."""

    settings: Sequence[str]
    tune: dict[str, list[Any]]
    against: str | None
    out: Path | None


def _fill_in(
    file: Path,
    methods: list[str],
    columns: list[str],
    seeds: int | None,
    regime: str | None,
    docs: Path | None,
    common: _Common,
) -> None:
    """Run what a table lacks and show it; `docs`: a folder of results to write its page into."""
    from reproduce.table_file import read_table, table_folder

    # Told at once, what is wrong outside the methods; then torch is imported.
    read_table(file, common.settings, methods, columns, common.tune, regime)
    from reproduce.tables import compare_table

    folder = common.out or table_folder(file, regime)
    with terminal.stoppable():
        shown = compare_table(
            file,
            settings=common.settings,
            methods=methods,
            columns=columns,
            seeds=seeds,
            tune=common.tune,
            against=common.against,
            regime=regime,
            out=folder,
            watch=terminal.watch,
            report=terminal.say,
        )
    for table in shown.tables():
        terminal.console.print(table)
    terminal.say(f"\nSaved to {folder}/table.md and table.json.")
    if docs is not None:
        terminal.say(f"Page: {_page(shown.summary(), docs)}")


def _page(summary: Mapping[str, Any], docs: Path) -> Path:
    """Write the page of a table, with its pictures if matplotlib is installed."""
    from reproduce.pages import write_docs, write_pages

    page = write_docs(summary, docs)
    try:
        from reproduce.drawing import write_pictures
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        terminal.say(
            "The page has no picture, which needs matplotlib: pip install 'coterie[report]'."
        )
    else:
        write_pictures(summary, docs)
        write_pages(docs)
    return page


def _compare(values: dict[str, Any], methods: list[str], seeds: int, common: _Common) -> None:
    """Compare methods on a run file."""
    import coterie
    from coterie.config.read import load_here

    config = load_here(values, common.tune)
    folder = common.out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = coterie.compare(
            config,
            methods,
            seeds=seeds,
            tune=common.tune,
            against=common.against,
            out=folder,
            watch=terminal.watch,
            report=terminal.say,
        )
    for table in comparison.tables():
        terminal.console.print(table)
    terminal.say(f"\nSaved to {folder}/compare.md and compare.json.")
    terminal.say(
        "To add methods or seeds, run the command again with them; finished runs are reused."
    )


def _listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]

"""The command `coterie compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Plugins, Settings
from coterie.errors import CoterieError

METHODS: list[str] = ["pretrained", "local", "fedavg", "comigs-1g1s"]
"""What is compared unless the command is told."""
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="For a table file: also save the results as JSON and a generated page in this folder.",
        show_default=False,
    ),
]


def compare(
    file: Annotated[
        Path | None,
        typer.Argument(help="A run file or a table file (YAML). Default: the built-in demo."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated method names (see `coterie methods`). For a table file: "
            f"names or methods of its rows. Default: {', '.join(METHODS)}; for a table file, all.",
            show_default=False,
        ),
    ] = None,
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
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs. Default: runs/compare-NAME; for tables, runs/FOLDER-NAME.",
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

        coterie compare recipes/small/comigs-table4.yaml --set data_root=FOLDER
    """
    from coterie.table_file import is_table

    if file is not None and is_table(file):
        _fill_in(file, settings or (), _listed(methods), _listed(columns), seeds, out, write_docs)
        return
    if columns is not None:
        raise CoterieError("--columns needs a table file; this is a run file.")
    if write_docs is not None:
        raise CoterieError("--write-docs needs a table file; this is a run file.")
    names = METHODS if methods is None else _listed(methods)
    _compare(file, settings or (), names, seeds or 1, out)


def _fill_in(
    file: Path,
    settings: Sequence[str],
    methods: list[str],
    columns: list[str],
    seeds: int | None,
    out: Path | None,
    docs: Path | None,
) -> None:
    """Run what a table lacks and show it; `docs`: a folder of results to write its page into."""
    import coterie
    from coterie.table_file import read_table, table_folder

    read_table(file, settings, methods, columns)  # told at once, what is wrong outside the methods
    folder = out or table_folder(file)
    with terminal.stoppable():
        shown = coterie.compare_table(
            file,
            settings=settings,
            methods=methods,
            columns=columns,
            seeds=seeds,
            out=folder,
            watch=terminal.watch,
            report=terminal.say,
        )
    for table in shown.tables():
        terminal.console.print(table)
    terminal.say(f"\nSaved to {folder}/table.md and table.json.")
    if docs is not None:
        from coterie.results.pages import write_docs

        terminal.say(f"Page: {write_docs(shown.summary(), docs)}")


def _compare(
    file: Path | None, settings: Sequence[str], methods: list[str], seeds: int, out: Path | None
) -> None:
    """Compare methods on a run file."""
    import coterie
    from coterie.run_file import check_texts

    check_texts(file, settings)  # at once; torch takes seconds to import
    config = coterie.load_config(file, settings)
    folder = out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = coterie.compare(
            config,
            methods,
            seeds=seeds,
            out=folder,
            watch=terminal.watch,
            report=terminal.say,
        )
    terminal.console.print(comparison.table())
    terminal.say(f"\nSaved to {folder}/compare.md and compare.json.")
    terminal.say(
        "To add methods or seeds, run the command again with them; finished runs are reused."
    )


def _listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]

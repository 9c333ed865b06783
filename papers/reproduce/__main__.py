"""The command `python -m reproduce TABLE.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli import main, terminal
from coterie.cli.options import Command, Settings, listed
from coterie.cli.run import Against, Tune, progress
from coterie.errors import CoterieError

Methods = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated names or methods of rows to run. Default: all.", show_default=False
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(help="Comma-separated columns to run. Default: all.", show_default=False),
]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="Runs per cell. Default: the table's.", show_default=False),
]
Regime = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="One of the table's `regimes`, in which the whole table is run.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the runs. Default: runs/FOLDER-NAME, with -REGIME if one is given.",
        show_default=False,
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Also save the results in this folder, as JSON and as a generated page with a "
        "picture.",
        show_default=False,
    ),
]
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command)
def reproduce(
    file: Annotated[Path, typer.Argument(metavar="TABLE.yaml", help="A table file.")],
    methods: Methods = None,
    columns: Columns = None,
    seeds: Seeds = None,
    tune: Tune = None,
    against: Against = None,
    regime: Regime = None,
    settings: Settings = None,
    out: Out = None,
    write_docs: WriteDocs = None,
) -> None:
    """Fill a paper's table in again, and set our figures beside the paper's.

    Finished runs are saved and reused: to continue after an interruption, or to add rows, columns
    or seeds, run the command again.

    Example, in papers/ (see tables.md for table files):

        python -m reproduce recipes/small/comigs-table4.yaml --set data_root=FOLDER
    """
    from coterie.config.tune import read_tune
    from reproduce.table_file import is_table, read_table, table_folder

    if not is_table(file):
        raise CoterieError(f"{file} is a run file; use `coterie run` or `coterie compare`.")
    chosen: dict[str, Any] = {
        "settings": settings or (),
        "methods": listed(methods),
        "columns": listed(columns),
        "tune": read_tune(tune or ()),
        "regime": regime,
    }
    read_table(file, **chosen)  # mistakes outside the methods, before torch is imported
    from reproduce.pages import shown
    from reproduce.tables import compare_table

    folder = out or table_folder(file, regime)
    with terminal.stoppable():
        summary = compare_table(
            file,
            **chosen,
            seeds=seeds,
            against=against,
            out=folder,
            callbacks=progress(),
            report=terminal.say,
        )
    for table in shown(summary):
        terminal.console.print(table)
    terminal.say(f"\nSaved to {folder}/table.md and table.json.")
    if write_docs is not None:
        terminal.say(f"Page: {_page(summary, write_docs)}")


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


if __name__ == "__main__":
    main(app)

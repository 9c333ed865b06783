"""The command `coterie compare`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import terminal
from coterie.cli.options import Debug, Settings
from coterie.errors import CoterieError

METHODS = "pretrained,local,fedavg,comigs-1g1s"
"""What is compared unless the command is told."""


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
    from coterie.paper_tables import is_table

    if file is not None and is_table(file):
        _fill_in(file, settings or (), _listed(methods), _listed(columns), seeds, out)
        return
    if columns is not None:
        raise CoterieError("--columns chooses columns of a table file; a run file has none.")
    names = _listed(METHODS if methods is None else methods)
    _compare(file, settings or (), names, seeds or 1, out)


def _fill_in(
    file: Path,
    settings: Sequence[str],
    methods: list[str],
    columns: list[str],
    seeds: int | None,
    out: Path | None,
) -> None:
    """Run what a table lacks, and show it."""
    from coterie.paper_tables import compare_table, table_folder
    from coterie.runs import ConsoleWatch

    folder = out or table_folder(file)
    with terminal.stoppable():
        shown = compare_table(
            file,
            settings=settings,
            methods=methods,
            columns=columns,
            seeds=seeds,
            out=folder,
            watch=partial(ConsoleWatch, terminal.console),
            report=terminal.say,
        )
    for table in shown.tables():
        terminal.console.print(table)
    terminal.say(f"\nAlso in {folder}/table.md and table.json.")


def _compare(
    file: Path | None, settings: Sequence[str], methods: list[str], seeds: int, out: Path | None
) -> None:
    """Compare methods on a run file."""
    from coterie import api
    from coterie.config import load_config
    from coterie.runs import ConsoleWatch

    config = load_config(file, settings)
    folder = out or Path("runs") / f"compare-{config.name}"
    with terminal.stoppable():
        comparison = api.compare(
            config,
            methods,
            seeds=seeds,
            out=folder,
            watch=partial(ConsoleWatch, terminal.console),
            report=terminal.say,
        )
    terminal.console.print(comparison.table())
    terminal.say(f"\nAlso in {folder}/compare.md and compare.json.")
    terminal.say("For more methods or seeds ask again, with them: only what is new is run.")


def _listed(names: str | None) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in (names or "").split(",") if name.strip()]

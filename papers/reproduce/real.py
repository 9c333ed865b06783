"""Measure the tables of recipes/real, whose base has 135 M parameters, and write their pages.

`python -m reproduce.real DATA` runs the cells that real.yaml lists, in that order, in one process
that uses all cores. It can be stopped at any time; started again, it keeps the cells that are
finished and continues the interrupted one after its last complete round.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import BaseModel, ConfigDict

from coterie.analysis.tables import Summary
from coterie.cli import main, terminal
from coterie.cli.run import progress
from coterie.runs import Callback
from reproduce.pages import REAL, write_docs
from reproduce.tables import Cell, compare_table

ROOT = Path(__file__).parents[1]
ORDER = Path(__file__).with_name("real.yaml")
SEEDS = 3
"""The most that a cell may have."""


class Entry(BaseModel):
    """An entry of real.yaml: rows of one column of a table."""

    model_config = ConfigDict(extra="forbid")

    table: str
    column: str
    rows: tuple[str, ...]
    seed: int = 0

    @property
    def cells(self) -> list[Cell]:
        """The cells in the order in which they are run."""
        return [(self.column, row, self.seed) for row in self.rows]


def entries(path: Path = ORDER, tables: Sequence[str] = ()) -> list[Entry]:
    """Read the order in which cells are run; without `tables`, of all tables."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    order = [Entry.model_validate(entry) for entry in listed]
    return [entry for entry in order if not tables or entry.table in tables]


def measured(
    order: Sequence[Entry],
    data: Path,
    folder: Path,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Summary]:
    """Run cells one after another; yield a table with all its cells so far after each of them.

    Args:
        order: The cells.
        data: The folder of the data.
        folder: The folder of the table files. Runs are in `runs`, in the current folder.
        callbacks: The callbacks of every run.
        report: A function that is called with progress messages.
    """
    known: dict[str, list[Cell]] = {}
    total, number = sum(len(entry.rows) for entry in order), 0
    for entry in order:
        for cell in entry.cells:
            number += 1
            report(f"\nCell {number} of {total}: {entry.table}, {cell[0]}, {cell[1]}")
            known.setdefault(entry.table, []).append(cell)
            summary = compare_table(
                folder / f"{entry.table}.yaml",
                settings=[f"data_root={data.resolve()}"],
                seeds=SEEDS,
                only=known[entry.table],
                callbacks=callbacks,
                report=report,
            )
            yield {**summary, "command": "python -m reproduce.real DATA"}


def measure(
    data: Annotated[Path, typer.Argument(help="Folder of your data.")],
    first: Annotated[
        int | None,
        typer.Option(min=1, help="Run only this many entries of real.yaml. Default: all."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(help="Only this table of recipes/real; may be repeated. Default: all."),
    ] = None,
) -> None:
    """Run the cells of real.yaml in its order, and write their tables' pages to papers/results."""
    data = data.resolve()
    os.chdir(ROOT)
    with terminal.stoppable():
        order = entries(tables=table or ())[:first]
        for summary in measured(order, data, Path("recipes") / REAL, progress(), terminal.say):
            write_docs(summary, ROOT / "results")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(measure)

if __name__ == "__main__":
    main(app)

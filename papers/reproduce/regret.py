"""The command `python -m reproduce.regret RUNS`: methods over scenarios, from finished cells."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.analysis.significance import Unpaired
from coterie.analysis.tables import Summary, shown_of
from coterie.cli import main, terminal
from coterie.cli.options import Command, listed
from coterie.config.run import NOT_IN_DIGEST
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from reproduce.pages import page_name, read_result, shown
from reproduce.pages import write_docs as write_page
from reproduce.scenarios import new_cell
from reproduce.table_file import ColumnRuns, RowSpec, TableSpec, read_table, slug, table_folder

NOT_COMPARED = {*NOT_IN_DIGEST, "seed", "data_root"}
"""Configuration keys that may differ between a row's seeds in a scenario, or between machines."""
Runs = Annotated[
    Path, typer.Argument(metavar="RUNS", help="Folder of the runs of `python -m reproduce`.")
]
TableFile = Annotated[
    Path, typer.Option("--table", metavar="TABLE.yaml", help="Table file of the runs.")
]
Exclude = Annotated[
    str,
    typer.Option(
        help="Comma-separated names or methods of rows that are not candidates for the best single "
        "method."
    ),
]
WriteDocs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Also save the cells in this folder, as JSON and as a generated page.",
        show_default=False,
    ),
]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.command(cls=Command)
def regret(
    runs: Runs,
    table: TableFile = Path("recipes/small/grid.yaml"),
    exclude: Exclude = "auto,grouped,pretrained",
    write_docs: WriteDocs = None,
) -> None:
    """Compare methods (rows) over scenarios (columns): regret, harmed clients, time and traffic.

    Cells are found by the names of their run folders, and cells that are not finished are listed.
    With --write-docs, cells whose run folders are gone are kept from the result file in FOLDER.

    Example (see tables.md):

        python -m reproduce.regret runs/small-grid --write-docs results
    """
    summary = read_cells(runs, table, listed(exclude))
    if write_docs is not None:
        path = write_docs / f"{page_name(summary)}.json"
        if path.exists() and (earlier := read_result(path))["shows"] == summary["shows"]:
            summary = merged(summary, earlier)
    check_settings(summary)
    for part in shown(summary):
        terminal.console.print(part)
    if write_docs is not None:
        terminal.say(f"\nPage: {write_page(summary, write_docs)}")


def read_cells(runs: Path, file: Path, excluded: Sequence[str]) -> Summary:
    """Return the content of a result file with the finished cells of a folder.

    Args:
        runs: The folder of the table's runs.
        file: The table file.
        excluded: The names, or the methods, of the rows that are not candidates for the best single
            method.

    Raises:
        CoterieError: if there is no such folder, or a run of a cell is ambiguous or unusable.
    """
    if not runs.is_dir():
        raise CoterieError(f"There is no folder {runs}.")
    spec, columns = read_table(file)
    texts: dict[str, str] = {}
    left_out = set(map(slug, excluded))
    return {
        "table": spec.table,
        "shows": "regret",
        "file": file.as_posix(),
        "regime": None,
        "command": f"python -m reproduce {file} --set data_root=DATA\n"
        f"python -m reproduce.regret {table_folder(file)} --table {file} --write-docs results",
        "rows": [row.label for row in spec.rows],
        "excluded": [
            row.label
            for row in spec.rows
            if left_out & {slug(row.label), slug(str(row.settings.get("name")))}
        ],
        "seeds": [str(seed) for seed in _seeds(spec, columns[0])],
        "columns": [_column(runs, spec, column, texts) for column in columns],
        "texts": texts,
    }


def _seeds(spec: TableSpec, column: ColumnRuns) -> range:
    first = column.run.get("seed", 0)
    return range(first, first + spec.seeds)


def _column(
    runs: Path, spec: TableSpec, column: ColumnRuns, texts: dict[str, str]
) -> dict[str, Any]:
    """Return a scenario's finished cells, and add the weights of its texts to `texts`."""
    name, metric = column.spec.name, None
    cells: dict[str, dict[str, Any]] = {}
    outcomes = {
        (row.label, str(seed)): outcome
        for row in spec.rows
        for seed in _seeds(spec, column)
        if (outcome := _outcome(runs / slug(name), row, spec.point, seed))
    }
    if outcomes:
        asked = spec.shows or column.run.get("evaluation", {}).get("metric")
        metric = shown_of(outcomes.values(), asked)
        for (row, seed), outcome in outcomes.items():
            try:
                cell, weights = new_cell(outcome, metric)
            except Unpaired as reason:
                raise CoterieError(f"{name}, {row}, seed {seed}: {reason}.") from reason
            cells.setdefault(row, {})[seed] = {"settings": outcome["settings"], **cell}
            texts |= weights
    return {
        "name": name,
        "note": column.spec.note,
        "metric": metric.name if metric else None,
        "cells": cells,
    }


def _outcome(folder: Path, row: RowSpec, point: str | None, seed: int) -> dict[str, Any] | None:
    """Return the outcome of a cell with a hash of its settings; None if it is not finished."""
    paths = sorted(folder.glob(f"{slug(row.label)}-seed{seed}-*/result.json"))
    if len(paths) > 1:
        names = " and ".join(str(path.parent) for path in paths)
        raise CoterieError(f"{names} are runs of the same cell; remove the outdated ones.")
    if not paths:
        return None
    run = RunFolder(paths[0].parent)
    outcome, config = run.outcome, run.description["config"]
    assert outcome is not None, "the folder has a result"
    settings = {key: value for key, value in config.items() if key not in NOT_COMPARED}
    digest = blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4).hexdigest()
    return {**outcome, "reports": row.point or point or outcome["reports"], "settings": digest}


def merged(summary: Summary, earlier: Summary) -> Summary:
    """Add the cells of an earlier result file that are not in `summary`."""
    before = {column["name"]: column for column in earlier["columns"]}
    columns = []
    for column in summary["columns"]:
        cells: dict[str, Mapping[str, Any]] = {}
        known = before.get(column["name"], {"cells": {}, "metric": None})
        for row in summary["rows"]:
            both = {**known["cells"].get(row, {}), **column["cells"].get(row, {})}
            if by_seed := {seed: both[seed] for seed in summary["seeds"] if seed in both}:
                cells[row] = by_seed
        columns.append({**column, "cells": cells, "metric": column["metric"] or known["metric"]})
    return {**summary, "columns": columns, "texts": {**earlier["texts"], **summary["texts"]}}


def check_settings(summary: Summary) -> None:
    """Raise CoterieError if a row's cells in a scenario were run with different settings."""
    for column in summary["columns"]:
        for row, by_seed in column["cells"].items():
            if len({cell["settings"] for cell in by_seed.values()}) > 1:
                raise CoterieError(
                    f"{column['name']}, {row}: the cells with the seeds {', '.join(by_seed)} have "
                    "different settings; remove the outdated run folders, or the result file."
                )


if __name__ == "__main__":
    main(app)

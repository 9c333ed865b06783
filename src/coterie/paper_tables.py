"""A paper's table, filled in again.

Every cell is a run folder as `compare` makes them, so a stopped table is continued.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.config import RunConfig, parse
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.files import write_json, write_text
from coterie.results.messages import MessagesTable, traffic
from coterie.results.overlap import OverlapTable, jaccard
from coterie.results.pages import markdown
from coterie.results.paper import PaperTable
from coterie.runs import Watch
from coterie.table_file import (
    ColumnRuns,
    ColumnSpec,
    TableSpec,
    read_table,
    slug,
    table_folder,
    told_where,
)

Shown = PaperTable | OverlapTable | MessagesTable
"""What fills a table; each has `tables()` for the screen and `summary()` for JSON."""


@dataclass(frozen=True)
class Column:
    """A column with a valid run for each row, by the row's name."""

    spec: ColumnSpec
    run: RunConfig
    cells: Mapping[str, RunConfig]


def load_table(
    path: Path,
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> tuple[TableSpec, list[Column]]:
    """A table file whose runs are valid, methods and all; see `read_table`."""
    spec, found = read_table(path, settings, methods, columns)
    return spec, [_column(spec, runs) for runs in found]


def _column(spec: TableSpec, runs: ColumnRuns) -> Column:
    where = f"column {runs.spec.name!r}"
    cells = {}
    for row, run in runs.cells.items():
        with told_where(f"{where}, row {row!r}"):
            cells[row] = parse(run)
    with told_where(where):
        common = parse(runs.run)
    if spec.shows in ("exact_match", "rouge_l") and common.evaluation.generate is None:
        raise CoterieError(
            f"In {where}: {spec.shows} scores generated answers; set evaluation.generate to "
            "their maximum number of tokens."
        )
    return Column(runs.spec, common, cells)


def compare_table(
    path: str | Path,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: int | None = None,
    out: str | Path | None = None,
    watch: Callable[[], Watch] = Watch,
    report: Callable[[str], None] = lambda text: None,
) -> Shown:
    """Fill a paper's table in: run what is not there yet, and set it beside the paper's figures.

    `settings`, `methods` and `columns` as in `read_table`; `seeds` in place of the file's. Runs are
    in `out/COLUMN` (see `table_folder` for the default). The table is left in `out` as table.md and
    table.json, anew after every cell.
    """
    path = Path(path)
    spec, found = load_table(path, settings, methods, columns)
    folder = Path(out) if out is not None else table_folder(path)
    command = _command(path, settings, methods, columns, seeds)
    sessions = _sessions(found)
    match spec.shows:
        case "jaccard":
            shares = {c.spec.name: jaccard(s.participants(c.run)) for c, s in sessions}
            shown = OverlapTable(spec.table, shares, command)
        case "messages":
            weights = {
                c.spec.name: {name: traffic(s, cell) for name, cell in c.cells.items()}
                for c, s in sessions
            }
            shown = MessagesTable(spec.table, weights, command)
        case _:
            return _scores(spec, sessions, seeds or spec.seeds, folder, command, watch, report)
    write_table(shown, folder)
    return shown


def write_table(shown: Shown, folder: Path) -> None:
    """Leave a table in a folder, as Markdown and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = shown.summary()
    write_text(folder / "table.md", markdown(summary))
    write_json(folder / "table.json", summary)


def _command(
    path: Path,
    settings: Sequence[str],
    methods: Sequence[str],
    columns: Sequence[str],
    seeds: int | None,
) -> str:
    """The command that fills a table in; the folder of the data, which differs, is called DATA."""
    words = ["coterie", "compare", str(path)]
    for setting in settings:
        words += ["--set", "data_root=DATA" if setting.startswith("data_root=") else setting]
    chosen = {"--methods": ",".join(methods), "--columns": ",".join(columns), "--seeds": seeds}
    for option, value in chosen.items():
        words += [option, str(value)] if value else []
    return shlex.join(words)


def _sessions(columns: Sequence[Column]) -> list[tuple[Column, Session]]:
    """A session per column, in which every row can run; columns with the same bases share them."""
    sessions: list[tuple[Column, Session]] = []
    for column in columns:
        session = Session(column.run)
        for other, earlier in sessions:
            if _precision(other.run) == _precision(column.run):
                session.bases = earlier.bases
        for name, cell in column.cells.items():
            try:
                session.check(cell)
            except CoterieError as error:
                where = f"column {column.spec.name!r}, row {name!r}"
                raise CoterieError(f"In {where}: {error}") from error
        sessions.append((column, session))
    return sessions


def _precision(run: RunConfig) -> tuple[object, ...]:
    """Which bases may be shared: those loaded alike."""
    return run.training.precision, run.data.window, run.root


def _scores(
    spec: TableSpec,
    sessions: Sequence[tuple[Column, Session]],
    seeds: int,
    folder: Path,
    command: str,
    watch: Callable[[], Watch],
    report: Callable[[str], None],
) -> PaperTable:
    results: dict[str, dict[str, list[dict[str, Any]]]] = {
        column.spec.name: {name: [] for name in column.cells} for column, _ in sessions
    }
    shown = PaperTable(
        title=spec.table,
        paper=spec.paper,
        split=sessions[0][0].run.evaluation.split,
        figures={
            column.name: {row.label: row.paper[i] for row in spec.rows if row.paper}
            for i, column in enumerate(spec.columns)
        },
        notes={column.spec.name: column.spec.note for column, _ in sessions},
        results=results,
        asked={c.spec.name: spec.shows or c.run.evaluation.metric for c, _ in sessions},
        command=command,
    )
    points = {row.label: row.point or spec.point for row in spec.rows}
    for column, session in sessions:
        path = folder / slug(column.spec.name)
        for text in session.warnings:
            report(f"{column.spec.name}: {text}")
        for seed in range(column.run.seed, column.run.seed + seeds):
            for name, cell in column.cells.items():
                result = session.cell(cell, cell.name, seed, path, watch, report)
                point = points[name] or result["reports"]
                results[column.spec.name][name].append({**result, "reports": point})
                write_table(shown, folder)
    return shown

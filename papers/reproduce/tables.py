"""A paper's table, filled in again.

Every cell is a run folder as `compare` makes them, so a stopped table is continued.
"""

import json
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.analysis.cells import Cells, Tuner
from coterie.analysis.comparison import check_against
from coterie.analysis.tables import Summary
from coterie.config.run import RunConfig, parse
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.evaluation.metrics import metric_named
from coterie.files import write_json, write_text
from coterie.runs import Callback
from reproduce.messages import traffic
from reproduce.overlap import jaccard, ranges
from reproduce.pages import markdown, page_name, read_result
from reproduce.paper import PaperColumn, PaperTable
from reproduce.rounds import by_round
from reproduce.sizes import sizes
from reproduce.table_file import (
    MEASURED,
    ColumnRuns,
    ColumnSpec,
    TableSpec,
    prefix_errors,
    read_table,
    slug,
    table_folder,
)

Tune = Mapping[str, Sequence[Any]]
"""Values by dotted key; see `coterie.compare`."""
Cell = tuple[str, str, int]
"""The column, row and seed of a run."""


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
    tune: Tune | None = None,
    regime: str | None = None,
) -> tuple[TableSpec, list[Column]]:
    """Read a table file, and check its runs including their methods; see `read_table`."""
    spec, runs = read_table(path, settings, methods, columns, tune, regime)
    return spec, [_column(spec, column) for column in runs]


def _column(spec: TableSpec, runs: ColumnRuns) -> Column:
    where = f"column {runs.spec.name!r}"
    cells = {}
    for row, run in runs.cells.items():
        with prefix_errors(f"{where}, row {row!r}"):
            cells[row] = parse(run)
    with prefix_errors(where):
        common = parse(runs.run)
    shown = None if spec.shows in (None, *MEASURED) else metric_named(spec.shows)
    if shown and shown.needs == "answers" and common.evaluation.generate is None:
        raise CoterieError(
            f"In {where}: {spec.shows} scores generated answers; set evaluation.generate to "
            "the maximum number of tokens of an answer."
        )
    if spec.figure and spec.figure.kind == "curves" and common.evaluation.every is None:
        raise CoterieError(f"In {where}: curves need scores by round; set evaluation.every.")
    return Column(runs.spec, common, cells)


def compare_table(
    path: str | Path,
    *,
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    seeds: int | None = None,
    tune: Tune | None = None,
    against: str | None = None,
    regime: str | None = None,
    only: Collection[Cell] | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Fill a paper's table in: run what is not there yet, and set it beside the paper's figures.

    `settings`, `methods`, `columns` and `regime` as in `read_table`; `seeds`, `tune` and `against`
    in place of the file's. Runs are in `out/COLUMN` (see `table_folder` for the default).
    `only`: the cells that are run; the table shows no figures for other cells. None: all cells.
    The table is left in `out` as table.md and table.json, anew after every cell.

    Returns:
        The content of table.json; `reproduce.pages.shown` makes tables of it.
    """
    path = Path(path)
    spec, loaded = load_table(path, settings, methods, columns, tune, regime)
    check_against(against, loaded[0].cells)
    folder = Path(out) if out is not None else table_folder(path, regime)
    head: Summary = {
        "table": spec.table,
        "shows": spec.shows if spec.shows in MEASURED else "scores",
        "file": path.as_posix(),
        "regime": regime,
        "command": _command(path, settings, methods, columns, seeds, tune, against, regime),
    }
    _check_folder(folder, page_name(head))
    sessions = _sessions(loaded)
    if head["shows"] in MEASURED:
        summary = {**head, **_measured(head["shows"], sessions)}
        write_table(summary, folder)
        return summary
    scores = _empty(head, spec, sessions, against)
    wanted = _wanted(loaded, seeds or spec.seeds, only)
    _fill_in(scores, spec, sessions, wanted, folder, callbacks, report)
    write_table(scores.summary(), folder)
    return scores.summary()


def _measured(shows: str, sessions: Sequence[tuple[Column, Session]]) -> Summary:
    """Measure the data or the messages of each column, without any run."""
    columns: dict[str, Any] = {}
    more: Summary = {}
    for column, session in sessions:
        name = column.spec.name
        match shows:
            case "jaccard":
                columns[name] = jaccard(session.participants(column.run))
                if column.run.divide:
                    mixtures = column.run.divide.mixtures or {}
                    more.setdefault("ranges", {})[name] = ranges(columns[name], mixtures)
            case "tokens":
                columns[name] = sizes(session.participants(column.run))
            case _:
                cells = column.cells.items()
                columns[name] = {row: traffic(session, cell) for row, cell in cells}
    return {"columns": columns, **more, "paper": {c.spec.name: c.spec.paper for c, _ in sessions}}


def _check_folder(folder: Path, name: str) -> None:
    """Refuse a folder with another table, or with this table in another regime."""
    earlier = folder / "table.json"
    if earlier.exists() and (other := page_name(read_result(earlier))) != name:
        raise CoterieError(f"{folder} holds the table {other}; choose another --out for {name}.")


def write_table(summary: Summary, folder: Path) -> None:
    """Leave a table in a folder, as Markdown and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", markdown(summary))
    write_json(folder / "table.json", summary)


def _command(
    path: Path,
    settings: Sequence[str],
    methods: Sequence[str],
    columns: Sequence[str],
    seeds: int | None,
    tune: Tune | None,
    against: str | None,
    regime: str | None,
) -> str:
    """Return the command that fills a table in; the folder of the data, which differs, is DATA."""
    words = ["python", "-m", "reproduce", str(path)]
    if regime:
        words += ["--regime", regime]
    for setting in settings:
        words += ["--set", "data_root=DATA" if setting.startswith("data_root=") else setting]
    for key, values in (tune or {}).items():
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        words += ["--tune", f"{key}={','.join(texts)}"]
    chosen = {"--methods": ",".join(methods), "--columns": ",".join(columns), "--seeds": seeds}
    for option, value in {**chosen, "--against": against}.items():
        words += [option, str(value)] if value else []
    return shlex.join(words)


def _sessions(columns: Sequence[Column]) -> list[tuple[Column, Session]]:
    """Return a session for each column, in which all rows can run; equal bases are shared."""
    sessions: list[tuple[Column, Session]] = []
    for column in columns:
        session = Session(column.run)
        for other, earlier in sessions:
            if _precision(other.run) == _precision(column.run):
                session.bases = earlier.bases
        for name, cell in column.cells.items():
            with prefix_errors(f"column {column.spec.name!r}, row {name!r}"):
                session.check(cell)
        sessions.append((column, session))
    return sessions


def _precision(run: RunConfig) -> tuple[object, ...]:
    """Return the settings that columns must have in common to share their bases."""
    return run.training.precision, run.data.window, run.root, run.device


def _empty(
    head: Summary,
    spec: TableSpec,
    sessions: Sequence[tuple[Column, Session]],
    against: str | None,
) -> PaperTable:
    """Return a table of scores in which nothing has been run."""
    places = {column.name: place for place, column in enumerate(spec.columns)}
    columns = [
        PaperColumn(
            name=(name := column.spec.name),
            results={row: [] for row in column.cells},
            figures={row.label: row.paper[places[name]] for row in spec.rows if row.paper},
            deviations={
                row.label: row.paper_std[places[name]] for row in spec.rows if row.paper_std
            },
            note=column.spec.note,
            asked=spec.shows or column.run.evaluation.metric,
        )
        for column, _ in sessions
    ]
    split, figure = sessions[0][0].run.evaluation.split, spec.figure
    return PaperTable(
        head,
        spec.paper,
        split,
        columns,
        against or spec.against,
        figure.model_dump() if figure else None,
    )


def _wanted(
    columns: Sequence[Column], seeds: int, only: Collection[Cell] | None
) -> list[dict[int, list[str]]]:
    """Return the rows to run for each column, by seed.

    Raises:
        CoterieError: `only` contains a cell that the table does not have.
    """
    missing, wanted = set(only or ()), []
    for column in columns:
        name, by_seed = column.spec.name, {}
        for seed in range(column.run.seed, column.run.seed + seeds):
            rows = [row for row in column.cells if only is None or (name, row, seed) in only]
            by_seed[seed] = rows
            missing -= {(name, row, seed) for row in rows}
        wanted.append(by_seed)
    if missing:
        name, row, seed = min(missing)
        raise CoterieError(f"The table has no cell {name}, {row} with the seed {seed}.")
    return wanted


def _fill_in(
    shown: PaperTable,
    spec: TableSpec,
    sessions: Sequence[tuple[Column, Session]],
    wanted: Sequence[Mapping[int, Sequence[str]]],
    folder: Path,
    callbacks: Sequence[Callback],
    report: Callable[[str], None],
) -> None:
    """Run column by column, and write the table after every run that was not finished before."""
    points = {row.label: row.point or spec.point for row in spec.rows}
    tunes = {row.label: {**spec.tune, **row.tune} for row in spec.rows}
    tuned: list[dict[str, tuple[Tuner, list[RunConfig]]]] = []
    for column, session in sessions:
        tuners = {row: Tuner(session, tunes[row]) for row in column.cells}
        trials = {row: tuners[row].trials(row, run) for row, run in column.cells.items()}
        tuned.append({row: (tuners[row], tried) for row, tried in trials.items()})
    total = sum(len(trials) for rows in tuned for _, trials in rows.values())
    total += sum(len(rows) for by_seed in wanted for rows in by_seed.values())
    cells, written = Cells(total, callbacks, report), 0
    of_columns = zip(sessions, shown.columns, tuned, wanted, strict=True)
    for (column, session), into, rows, by_seed in of_columns:
        name = column.spec.name
        for text in session.warnings:
            report(f"{name}: {text}")
        path, runs = folder / slug(name), dict(column.cells)
        for row, (tuner, trials) in rows.items():
            if trials:
                runs[row], into.tuned[row] = tuner.choose(cells, trials, path, points[row])
        for seed, rows_of_seed in by_seed.items():
            if rows_of_seed:
                common = column.run.model_copy(update={"seed": seed})
                into.floor.append(session.floor(common))
            for row in rows_of_seed:
                named = {"seed": seed, "name": f"{slug(row)}-seed{seed}"}
                run = runs[row].model_copy(update=named)
                result, outcome = cells.finished(session, run, path)
                point = points[row] or outcome["reports"]
                if spec.figure is not None and spec.figure.kind == "curves":
                    outcome["rounds"] = by_round(result.metrics(), point)
                into.results[row].append({**outcome, "reports": point})
                if cells.worked_on > written:
                    write_table(shown.summary(), folder)
                    written = cells.worked_on

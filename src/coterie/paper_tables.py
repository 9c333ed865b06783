"""Table files: a paper's table as data, and what it takes to fill it in again.

A table file is YAML with the rows (methods) and columns (data sets) of a table and the paper's
figures. Every cell is a run folder as `compare` makes them, so a stopped table is continued.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coterie.config import RunConfig, apply_setting, parse, read_mapping, run_file
from coterie.config_errors import refuse_renamed, sentence
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.files import path_part, write_json, write_text
from coterie.results.messages import MessagesTable, traffic
from coterie.results.overlap import OverlapTable, jaccard
from coterie.results.paper import PaperTable
from coterie.runs import Watch

Shown = PaperTable | OverlapTable | MessagesTable
"""What fills a table; each has `tables()` for the screen and `summary()` for JSON."""


Shows = Literal["perplexity", "accuracy", "exact_match", "rouge_l", "jaccard", "messages"]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowSpec(_Spec):
    """One entry of `rows`: a method and the paper's figures for it."""

    name: str = Field(default="", description="of the row; default: the method's name")
    method: str | dict[str, Any] = Field(description="as in a run file")
    paper: tuple[float | None, ...] = Field(
        default=(),
        description="the paper's figure for each column, shares in per cent; null where it has"
        " none",
    )

    point: Literal["trained", "aggregated"] | None = Field(
        default=None, description="which models are scored, in place of the table's"
    )

    @property
    def settings(self) -> dict[str, Any]:
        """The method as a mapping."""
        return {"name": self.method} if isinstance(self.method, str) else self.method

    @property
    def label(self) -> str:
        """The row's name."""
        return self.name or str(self.settings.get("name"))


class ColumnSpec(_Spec):
    """One entry of `columns`: a data set, or another setting in which all rows are run."""

    name: str = Field(description="of the column; its runs are in a folder named after it")
    run: dict[str, Any] = Field(default={}, description="keys of a run file, merged over `run`")
    methods: dict[str, dict[str, Any]] = Field(
        default={}, description="settings by row, merged over the row's method"
    )
    note: str = Field(default="", description="shown under the table")


class TableSpec(_Spec):
    """A table file."""

    table: str = Field(description="what the table is; its title")
    paper: str = Field(default="", description="what the paper's figures were measured on")
    shows: Shows | None = Field(
        default=None,
        description="what is measured; default: each column's evaluation.metric, or what suits it",
    )
    seeds: int = Field(default=1, ge=1, description="runs per cell")
    point: Literal["trained", "aggregated"] | None = Field(
        default=None, description="which models are scored; default: what each method reports"
    )
    run: dict[str, Any] = Field(default={}, description="keys of a run file for all columns")
    columns: tuple[ColumnSpec, ...] = Field(min_length=1, description="data sets or settings")
    rows: tuple[RowSpec, ...] = Field(default=(), description="methods, and the paper's figures")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.rows and self.shows != "jaccard":
            raise ValueError(f"a table that shows {self.shows or 'scores'} needs `rows`")
        for what, names in (
            ("rows", [row.label for row in self.rows]),
            ("columns", [column.name for column in self.columns]),
        ):
            slugs = [slug(name) for name in names]
            for name, short in zip(names, slugs, strict=True):
                if not short:
                    raise ValueError(f"the name {name!r} in `{what}` has no letter or digit")
                if slugs.count(short) > 1:
                    raise ValueError(
                        f"two `{what}` are named {name!r} or nearly so; give each a name of its own"
                    )
        for row in self.rows:
            if row.paper and len(row.paper) != len(self.columns):
                raise ValueError(
                    f"the row {row.label!r} has {len(row.paper)} figures of the paper for"
                    f" {len(self.columns)} columns; give one for each, null where there is none"
                )
        known = [row.label for row in self.rows]
        for column in self.columns:
            for name in column.methods.keys() - set(known):
                raise ValueError(
                    f"the column {column.name!r} has settings for the row {name!r}, which is not"
                    f" there (rows: {', '.join(known)})"
                )
        return self


@dataclass(frozen=True)
class Column:
    """A column with a valid run for each row, by the row's name."""

    spec: ColumnSpec
    run: RunConfig
    cells: Mapping[str, RunConfig]


def is_table(path: Path) -> bool:
    """Whether a file describes a table rather than a run."""
    return not {"rows", "shows"}.isdisjoint(read_mapping(run_file(path)))


def slug(name: str) -> str:
    """A name as part of a path: "AG News, low" -> ag-news-low."""
    return path_part(name.lower())


def load_table(
    path: Path,
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
) -> tuple[TableSpec, list[Column]]:
    """Read a table file; `settings` (`key=value`) change the run of every column.

    `methods` keeps the rows of those names or methods only, `columns` the columns of those names.
    Raises CoterieError, in one sentence, for anything that is not valid.
    """
    values = read_mapping(path)
    refuse_renamed(values)
    try:
        spec = TableSpec.model_validate(values)
    except ValidationError as error:
        raise CoterieError(sentence(error, TableSpec, values)) from error
    rows = _chosen("row", methods, {r.label: (r.label, r.settings.get("name")) for r in spec.rows})
    kept = _chosen("column", columns, {c.name: (c.name,) for c in spec.columns})
    found = []
    for column in spec.columns:
        if column.name in kept:
            found.append(_column(spec, column, path, settings, rows))
    return spec, found


def _chosen(what: str, asked: Sequence[str], names: Mapping[str, Sequence[Any]]) -> list[str]:
    """The keys of which one of the names was asked for; all if nothing was."""
    for name in asked:
        if not any(slug(name) in map(slug, map(str, others)) for others in names.values()):
            raise CoterieError(f"The table has no {what} {name!r} ({what}s: {', '.join(names)}).")
    wanted = set(map(slug, asked))
    return [
        n for n, others in names.items() if not asked or wanted & {slug(str(o)) for o in others}
    ]


def _column(
    spec: TableSpec, column: ColumnSpec, path: Path, settings: Sequence[str], rows: Sequence[str]
) -> Column:
    run = merged(spec.run, column.run)
    run["data_root"] = str(path.parent / Path(run.get("data_root") or "").expanduser())
    for setting in settings:
        apply_setting(run, setting)
    for key in ("method", "pooled", "baselines"):
        if key in run:
            raise CoterieError(f"A table's rows are its methods; leave {key!r} out of its runs.")
    cells = {}
    for row in spec.rows:
        if row.label in rows:
            method = merged(row.settings, column.methods.get(row.label, {}))
            where = f"column {column.name!r}, row {row.label!r}"
            cells[row.label] = _parse({**run, "name": slug(row.label), "method": method}, where)
    common = _parse(run, f"column {column.name!r}")
    if spec.shows in ("exact_match", "rouge_l") and common.evaluation.generate is None:
        raise CoterieError(
            f"In column {column.name!r}: {spec.shows} is of answers that models write; set"
            " evaluation.generate to how many tokens they may have."
        )
    return Column(column, common, cells)


def _parse(run: Mapping[str, Any], where: str) -> RunConfig:
    try:
        return parse(run)
    except CoterieError as error:
        raise CoterieError(f"In {where}: {error}") from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two mappings as one; where both have a key, inner mappings are merged and `above` counts."""
    result = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value)
        result[key] = value
    return result


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

    `settings`, `methods` and `columns` as in `load_table`; `seeds` in place of the file's. Runs are
    in `out/COLUMN` (see `table_folder` for the default). The table is left in `out` as table.md and
    table.json, anew after every cell.
    """
    path = Path(path)
    spec, found = load_table(path, settings, methods, columns)
    folder = Path(out) if out is not None else table_folder(path)
    sessions = _sessions(found)
    match spec.shows:
        case "jaccard":
            shares = {c.spec.name: jaccard(s.participants(c.run)) for c, s in sessions}
            shown = OverlapTable(spec.table, shares)
        case "messages":
            weights = {
                c.spec.name: {name: traffic(s, cell) for name, cell in c.cells.items()}
                for c, s in sessions
            }
            shown = MessagesTable(spec.table, weights)
        case _:
            return _scores(spec, sessions, seeds or spec.seeds, folder, watch, report)
    write_table(shown, folder)
    return shown


def table_folder(path: Path) -> Path:
    """Where a table's runs are kept by default: recipes/pcl/table4.yaml -> runs/pcl-table4."""
    return Path("runs") / slug(f"{path.resolve().parent.name}-{path.stem}")


def write_table(shown: Shown, folder: Path) -> None:
    """Leave a table in a folder, as Markdown and JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "table.md", "\n".join(table.markdown() for table in shown.tables()))
    write_json(folder / "table.json", shown.summary())


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
    )
    points = {row.label: row.point or spec.point for row in spec.rows}
    for column, session in sessions:
        path = folder / slug(column.spec.name)
        for seed in range(column.run.seed, column.run.seed + seeds):
            for name, cell in column.cells.items():
                result = session.cell(cell, cell.name, seed, path, watch, report)
                point = points[name] or result["reports"]
                results[column.spec.name][name].append({**result, "reports": point})
                write_table(shown, folder)
    return shown

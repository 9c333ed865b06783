"""Table files: a paper's table as data.

A table file is YAML with the rows (methods) and columns (data sets) of a table and the paper's
figures. It is read without torch, so that errors are reported at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie.config.errors import validated
from coterie.config.tune import check_trials
from coterie.config.values import apply_setting, located, place_data, read_mapping
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS
from coterie.files import path_part

MEASURED = ("jaccard", "messages", "tokens")
"""Values of `shows` that are measured on the data, without runs or scores."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RowSpec(_Spec):
    """One entry of `rows`: a method and the paper's figures for it."""

    name: str = ""
    """name of the row; default: the method's name"""
    method: str | dict[str, Any]
    """the method, as in a run file"""
    run: dict[str, Any] = {}
    """keys of the sections `data` and `training` of a run file for this row, over which those of
    columns are merged"""
    paper: tuple[float | None, ...] = ()
    """the paper's figure for each column, shares in per cent; null: no figure"""
    paper_std: tuple[float | None, ...] = ()
    """the standard deviations that the paper gives with its figures"""
    point: Literal["trained", "aggregated"] | None = None
    """evaluation that is scored, in place of the table's"""
    tune: dict[str, list[Any]] = {}
    """values by dotted key to try this row with, beside the table's"""

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

    name: str
    """name of the column, and of its runs' folder"""
    run: dict[str, Any] = {}
    """keys of a run file, merged over `run`"""
    methods: dict[str, dict[str, Any]] = {}
    """method settings by row, merged over the row's method"""
    note: str = ""
    """note under the table"""
    paper: dict[str, str] = {}
    """the paper's figures, as text; jaccard: `most` and `least`, the ranges of clients with the
    most and the least topics in common; messages: by field of an upload; tokens: by client"""


class FigureSpec(_Spec):
    """`figure`: how a table is drawn."""

    kind: Literal["lines", "heat map", "curves"]
    """lines: a line for each row over the columns; heat map: rows by columns; curves: scores over
    rounds by client, a line for each row (needs evaluation.every)"""
    x: str = ""
    """what the columns are, such as number of clients"""
    y: str = ""
    """what the rows are; heat maps only"""


class TableSpec(_Spec):
    """A table file."""

    table: str
    """title of the table"""
    paper: str = ""
    """the paper's setting, such as base and data"""
    shows: str | None = None
    """metric, or jaccard, messages or tokens, which are measured on the data; default: each
    column's evaluation.metric, or the one that fits its data"""
    seeds: int = Field(default=1, ge=1)
    """runs per cell"""
    tune: dict[str, list[Any]] = {}
    """values by dotted key of a run file, to try each row with; the best on validation text are
    used"""
    point: Literal["trained", "aggregated"] | None = None
    """evaluation that is scored; default: the one each method reports"""
    run: dict[str, Any] = {}
    """keys of a run file for all columns"""
    regimes: dict[str, dict[str, Any]] = {}
    """other settings in which the whole table can be run, by name: keys of a run file, merged over
    those of every column"""
    against: str | None = None
    """the row that the others are compared with; default: the best of each column"""
    figure: FigureSpec | None = None
    """how the table is drawn"""
    columns: tuple[ColumnSpec, ...] = Field(min_length=1)
    """columns: data sets or settings"""
    rows: tuple[RowSpec, ...] = ()
    """rows: methods and the paper's figures"""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not self.rows and self.shows not in ("jaccard", "tokens"):
            raise ValueError(f"a table of {self.shows or 'scores'} needs `rows`")
        if self.shows is not None and self.shows not in MEASURED:
            METRICS.check(self.shows)
        if self.figure is not None and self.shows in MEASURED:
            raise ValueError(f"a table of {self.shows} has no `figure`")
        for key, names in (
            ("rows", [row.label for row in self.rows]),
            ("columns", [column.name for column in self.columns]),
            ("regimes", list(self.regimes)),
        ):
            slugs = [slug(name) for name in names]
            for name, short in zip(names, slugs, strict=True):
                if not short:
                    raise ValueError(f"the name {name!r} in `{key}` has no letter or digit")
                if slugs.count(short) > 1:
                    raise ValueError(
                        f"two `{key}` have the same or a similar name {name!r}; rename one"
                    )
        for row in self.rows:
            for kind, given in (("figures", row.paper), ("deviations", row.paper_std)):
                if given and len(given) != len(self.columns):
                    raise ValueError(
                        f"the row {row.label!r} has {len(given)} paper {kind} for "
                        f"{len(self.columns)} columns; give one per column, null for none"
                    )
        known = [row.label for row in self.rows]
        if self.against is not None and self.against not in known:
            raise ValueError(f"`against` names no row: {self.against!r} (rows: {', '.join(known)})")
        for column in self.columns:
            if column.paper and self.shows not in MEASURED:
                raise ValueError(
                    f"the column {column.name!r} has `paper`, which is for tables that show "
                    "jaccard, messages or tokens; give the paper's scores in `rows`"
                )
            for name in column.methods.keys() - set(known):
                raise ValueError(
                    f"the column {column.name!r} has settings for the unknown row {name!r} "
                    f"(rows: {', '.join(known)})"
                )
        return self


@dataclass(frozen=True)
class ColumnRuns:
    """A column's runs as plain data, of which all but the methods is checked."""

    spec: ColumnSpec
    run: Mapping[str, Any]
    """The settings that its rows have in common."""
    cells: Mapping[str, Mapping[str, Any]]
    """The run of each row, by its name."""


def is_table(path: Path) -> bool:
    """Return whether a file describes a table rather than a run."""
    return not {"rows", "shows"}.isdisjoint(read_mapping(located(path)))


def slug(name: str) -> str:
    """Return a name as part of a path: "AG News, low" -> ag-news-low."""
    return path_part(name.lower())


def table_folder(path: Path, regime: str | None = None) -> Path:
    """Return the default folder of a table's runs: recipes/pcl/table4.yaml -> runs/pcl-table4.

    In a regime: runs/pcl-table4-quarter.
    """
    return Path("runs") / slug(f"{path.resolve().parent.name}-{in_regime(path.stem, regime)}")


def in_regime(name: str, regime: str | None) -> str:
    """Return a table's name in a regime as part of a path: table4-quarter."""
    return name if regime is None else f"{name}-{slug(regime)}"


def read_table(
    path: Path,
    settings: Sequence[str] = (),
    methods: Sequence[str] = (),
    columns: Sequence[str] = (),
    tune: Mapping[str, Sequence[Any]] | None = None,
    regime: str | None = None,
) -> tuple[TableSpec, list[ColumnRuns]]:
    """Read a table file; `settings` (`key=value`) change the run of every column.

    `tune` takes the place of the file's. `methods` keeps the rows of those names or methods only,
    `columns` the columns of those names. In a regime, its keys are part of every column's run and
    its name of the title. Raises CoterieError, in one sentence, for anything that is not valid
    outside the methods.
    """
    values = read_mapping(path)
    spec = validated(TableSpec, values)
    if tune:
        rows = tuple(row.model_copy(update={"tune": {}}) for row in spec.rows)
        spec = spec.model_copy(update={"tune": tune, "rows": rows})
    if regime is not None:
        spec = _in_regime(spec, regime)
    rows = _chosen("row", methods, {r.label: (r.label, r.settings.get("name")) for r in spec.rows})
    kept = _chosen("column", columns, {c.name: (c.name,) for c in spec.columns})
    chosen = [column for column in spec.columns if column.name in kept]
    return spec, [_runs(spec, column, path, settings, rows) for column in chosen]


def _in_regime(spec: TableSpec, regime: str) -> TableSpec:
    """Return the table in a regime, whose keys are part of every column's run."""
    if regime not in spec.regimes:
        known = ", ".join(spec.regimes) or "none"
        raise CoterieError(f"The table has no regime {regime!r} (regimes: {known}).")
    columns = tuple(
        column.model_copy(update={"run": merged(column.run, spec.regimes[regime])})
        for column in spec.columns
    )
    title = f"{spec.table}: {regime}"
    return spec.model_copy(update={"table": title, "columns": columns})


def _chosen(kind: str, asked: Sequence[str], names: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the keys with a name that was asked for; all keys if none was."""
    for name in asked:
        if not any(slug(name) in map(slug, map(str, others)) for others in names.values()):
            raise CoterieError(f"The table has no {kind} {name!r} ({kind}s: {', '.join(names)}).")
    wanted = set(map(slug, asked))
    return [
        n for n, others in names.items() if not asked or wanted & {slug(str(o)) for o in others}
    ]


def _runs(
    spec: TableSpec, column: ColumnSpec, path: Path, settings: Sequence[str], rows: Sequence[str]
) -> ColumnRuns:

    def with_row(keys: Mapping[str, Any]) -> dict[str, Any]:
        run = merged(merged(spec.run, keys), column.run)
        place_data(run, path)
        for setting in settings:
            apply_setting(run, setting)
        return run

    run = with_row({})
    for key in ("method", "pooled", "baselines"):
        if key in run:
            raise CoterieError(f"A table's rows define its methods; remove {key!r} from its runs.")
    with prefix_errors(f"column {column.name!r}"):
        check_trials(run, spec.tune)
    cells = {}
    for row in spec.rows:
        if row.label in rows:
            if other := sorted(row.run.keys() - {"data", "training"}):
                raise CoterieError(
                    f"The row {row.label!r} may change the sections data and training of its runs, "
                    f"but not {other[0]!r}; set this in `run` of the table or of columns."
                )
            own = with_row(row.run)
            with prefix_errors(f"row {row.label!r}"):
                check_trials(own, row.tune)
            method = merged(row.settings, column.methods.get(row.label, {}))
            cells[row.label] = {**own, "name": slug(row.label), "method": method}
    return ColumnRuns(column, run, cells)


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefix the errors raised within the block with their place in the table."""
    try:
        yield
    except CoterieError as error:
        raise CoterieError(f"In {where}: {error}") from error


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings, and the mappings in them; `above` takes precedence."""
    result = dict(below)
    for key, value in above.items():
        under = below.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value)
        result[key] = value
    return result

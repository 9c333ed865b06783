"""A paper's table, with our figures beside the paper's: scores, ranks and how they agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isnan
from typing import Any

import pandas as pd

from coterie.analysis.comparison import (
    DECIMALS,
    MIXED,
    Comparison,
    clients_table,
    differences_tables,
    with_spread,
)
from coterie.analysis.frame import Frame, Result
from coterie.analysis.significance import COMMONEST, has_floor
from coterie.analysis.tables import Summary, Table, shown_of
from coterie.evaluation.metrics import Metric, metric_named
from coterie.evaluation.perplexity import PERPLEXITY
from reproduce.figures import compared as has_paper
from reproduce.rounds import curves

Figures = Mapping[str, float | None]
"""A column of the paper: its figure by row, None where it has none; shares are in per cent."""


@dataclass(frozen=True)
class PaperColumn:
    """Results by row and seed, and the paper's figures by row."""

    name: str
    results: Mapping[str, list[Result]]
    """Results of every row of the table; a row that has not run has none."""
    figures: Figures = field(default_factory=dict)
    deviations: Figures = field(default_factory=dict)
    """The standard deviations that the paper gives with its figures."""
    note: str = ""
    asked: str | None = None
    """The name of the metric; None selects the one that suits the data (`metric_of`)."""
    tuned: dict[str, Summary] = field(default_factory=dict)
    """The trials by which settings of rows were chosen; see `Comparison.tuned`."""
    floor: list[Result] = field(default_factory=list)
    """The score of always giving the commonest answer; see `Comparison.floor`."""

    @property
    def floored(self) -> bool:
        """Whether there are results, and a floor under them."""
        results = list(chain.from_iterable(self.results.values()))
        return bool(results) and has_floor(self.floor, shown_of(results, self.asked))


@dataclass(frozen=True)
class PaperTable:
    """Columns with the same rows.

    Rows may lack results while the table is under way, or figures of the paper. Ranks and the rank
    correlation of a column are over the rows that have both; without any figure of the paper, over
    all rows that have results.
    """

    head: Summary
    """The first entries of the summary: the table's title, file, regime and command."""
    paper: str
    split: str
    """The text that the models are scored on: test or validation."""
    columns: Sequence[PaperColumn]
    against: str | None = None
    """The row that the others are compared with; default: the best of each column."""
    figure: Summary | None = None
    """The settings of the table's figure, as in a table file; default: dots."""

    def summary(self) -> dict[str, Any]:
        """Return, by column, each row's score and rank, and the paper's figure and rank.

        `metric` is the name of the metric and the key of our mean, which is from 0 to 1 if it is a
        share; the paper's figures are as they were given. A row that has not run has 0 `seeds`.
        `rank` and `paper_rank` are among the rows that both have, `rank_of_all` among all.
        `rounds` are the scores by round, where results have them; see `rounds.curves`.
        """
        return {
            **self.head,
            "paper": self.paper,
            "split": self.split,
            **({"figure": dict(self.figure)} if self.figure else {}),
            "columns": [self._column(column) for column in self.columns],
        }

    def _column(self, column: PaperColumn) -> dict[str, Any]:
        finished = {row: runs for row, runs in column.results.items() if runs}
        settings = column.name, finished, self.split, column.asked, self.against
        comparison = Comparison(*settings, column.tuned, column.floor)
        metric, rows = comparison.metric, self._rows(column, comparison)
        return {
            "name": column.name,
            "note": column.note,
            "metric": metric.name,
            "correlation": correlation(rows, metric),
            "rows": rows,
        }

    def _rows(self, column: PaperColumn, comparison: Comparison) -> list[dict[str, Any]]:
        """Return all rows of a column, with ranks among the rows that can be compared."""
        metric, paper = comparison.metric, column.figures
        measured = {row.pop("method"): row for row in comparison.summary()}
        for name, row in measured.items():
            if all("rounds" in result for result in comparison.results.get(name, [{}])):
                row["rounds"] = curves(comparison.results[name], metric)
        ours = {name: measured[name][metric.name] for name in comparison.results}
        figures: Frame = pd.DataFrame({"ours": ours, "paper": paper}, list(ours), dtype=float)
        both = figures.dropna() if figures["paper"].notna().any() else figures
        order = both.map(metric.order).round(DECIMALS)
        # 0 stands for none.
        floored = any(other.floored for other in self.columns)
        names = [*column.results, *([COMMONEST] if floored else [])]
        ranks = order.rank(method="min").reindex(names).fillna(0).astype(int)
        return [
            {
                "row": name,
                "seeds": 0,
                **measured.get(name, {}),
                "rank_of_all": measured[name]["rank"] if name in measured else None,
                "rank": int(ranks["ours"][name]) or None,
                "paper": paper.get(name),
                "paper_std": column.deviations.get(name),
                "paper_rank": int(ranks["paper"][name]) or None,
            }
            for name in names
        ]


def correlation(rows: Sequence[Summary], metric: Metric = PERPLEXITY) -> float | None:
    """Return Spearman's rank correlation of our figures with the paper's, over rows with both.

    None if there are fewer than three such rows, or if all figures of one side are equal.
    """
    figures: Frame = pd.DataFrame(rows, columns=[metric.name, "paper"], dtype=float).dropna()
    if len(figures) < 3:
        return None
    agreement = float(figures.round(DECIMALS).corr(method="spearman").iloc[0, 1])
    return None if isnan(agreement) else agreement


def score_tables(summary: Summary) -> list[Table]:
    """Show a summary in the paper's layout; then, per column, each client's scores.

    Where rows could be compared, a table says by how much they differ.
    """
    own = (_of_column(summary, column) for column in summary["columns"] if _scored(column))
    return [_layout(summary), *chain.from_iterable(own)]


def _scored(column: Summary) -> list[Summary]:
    """Return the rows of which each client's scores are known."""
    return [row for row in column["rows"] if "clients" in row]


def _of_column(summary: Summary, column: Summary) -> list[Table]:
    metric, name = metric_named(column["metric"]), column["name"]
    rows = {
        row["row"]: {**row, "method": row["row"], "rank": row["rank_of_all"]}
        for row in _scored(column)
    }
    scores = f"{summary['split']} {metric.label}"
    table = clients_table(f"{name}: {scores}", metric, rows)
    title = f"{name}: differences in mean {scores}"
    return [table, *differences_tables(title, metric, list(rows.values()))]


def _layout(summary: Summary) -> Table:
    columns, compared = summary["columns"], has_paper(summary)
    lines = [[row["row"]] for row in columns[0]["rows"]]
    last, heads = ["Spearman"], ["method"]
    for column in columns:
        metric, agreement = metric_named(column["metric"]), column["correlation"]
        heads += [column["name"], "rank", *(["paper", "rank"] if compared else [])]
        for row, line in zip(column["rows"], lines, strict=True):
            line += _cells(row, metric, compared)
        last += ["" if agreement is None else f"{agreement:.2f}", "", "", ""]
    rows = [*lines, last] if compared else lines
    note, group = _note(summary, compared), 4 if compared else 2
    return Table(summary["table"], heads, rows, note, group)


def _cells(row: Summary, metric: Metric, compared: bool) -> list[str]:
    """Return a row's cells in one column; ours are empty where the row has not run."""
    ours = with_spread(row, metric) if row["seeds"] else ""
    rank, paper_rank = (str(row[key] or "") for key in ("rank", "paper_rank"))
    figure = "" if row["paper"] is None else f"{row['paper']:.2f}"
    if row.get("paper_std") is not None:
        figure += f" ({row['paper_std']:.2f})"
    return [ours, rank, figure, paper_rank] if compared else [ours, rank]


def _note(summary: Summary, compared: bool) -> str:
    columns = summary["columns"]
    counts = sorted({row["seeds"] for column in columns for row in column["rows"]} - {0})
    seeds = " to ".join(map(str, counts)) or "no"
    spread = " (standard deviation)" if max(counts, default=0) > 1 else ""
    many = "" if counts == [1] else "s"
    run = [column for column in columns if any(row["seeds"] for row in column["rows"])] or columns
    split, metrics = summary["split"], {c["name"]: metric_named(c["metric"]) for c in run}
    if len(distinct := set(metrics.values())) == 1:
        (metric,) = distinct
        mean = f"Mean {split} {metric.label} over clients{spread}"
        parts = [f"{mean}, {seeds} seed{many}. {metric.better}"]
    else:
        parts = [f"Means over clients{spread}, {seeds} seed{many}."]
        parts += [f"{name}: {split} {m.label}. {m.better}" for name, m in metrics.items()]
    parts += [MIXED] if len(counts) > 1 and counts[0] == 1 else []
    if compared:
        where = f" ({summary['paper']})" if summary["paper"] else ""
        parts += [
            f"Columns `paper`: the paper's figures{where}. Ranks are among the rows with both "
            "figures; Spearman is the correlation of the two rankings."
        ]
    parts += [f"{column['name']}: {column['note']}." for column in columns if column["note"]]
    return " ".join(parts)

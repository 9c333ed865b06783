"""A paper's table, with our figures beside the paper's: scores, ranks and how they agree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import pandas as pd

from coterie.results.frame import Frame, Result
from coterie.results.tables import ALIKE, Comparison, Table, with_spread
from coterie.scoring.metrics import METRICS, PERPLEXITY, Metric

Figures = Mapping[str, float | None]
"""A column of the paper: its figure by row, None where it has none; shares are in per cent."""


@dataclass(frozen=True)
class PaperTable:
    """Results by column, row and seed, and the paper's figures by column and row.

    Rows may lack results while the table is under way, or figures of the paper. Ranks and the rank
    correlation of a column are over the rows that have both; without any figure of the paper, over
    all rows that have results.
    """

    title: str
    paper: str
    split: str
    """Which text the models are scored on: test or validation."""
    figures: Mapping[str, Figures]
    notes: Mapping[str, str]
    results: Mapping[str, Mapping[str, Sequence[Result]]]
    asked: Mapping[str, str | None] = field(default_factory=dict)
    """By column, what is asked for of the scores; see `metric_of`."""

    def summary(self) -> dict[str, Any]:
        """By column: what was measured per row, its rank, the paper's figure and rank.

        `metric` is what was measured and the key of our mean, which is from 0 to 1 if it is a
        share; the paper's figures are as they were given.
        """
        columns = [
            {
                "name": name,
                "note": self.notes[name],
                "metric": metric.key,
                "correlation": correlation(rows, metric),
                "rows": rows,
            }
            for name in self.results
            for metric in [self._comparison(name).metric]
            for rows in [self._rows(name)]
        ]
        return {"table": self.title, "paper": self.paper, "split": self.split, "columns": columns}

    def tables(self) -> list[Table]:
        """The table in the paper's layout; then, per column, each client's figures."""
        columns = map(self._comparison, self.results)
        return [self._layout(), *(column.table() for column in columns if column.results)]

    def _comparison(self, column: str) -> Comparison:
        """A column's rows that have results."""
        finished = {row: found for row, found in self.results[column].items() if found}
        return Comparison(column, finished, self.split, self.asked.get(column))

    def _layout(self) -> Table:
        columns = self.summary()["columns"]
        compared = any(row["paper"] is not None for c in columns for row in c["rows"])
        names = list(dict.fromkeys(name for rows in self.results.values() for name in rows))
        lines = [[name] for name in names]
        last, heads = ["Spearman"], ["method"]
        for column in columns:
            found = {row["row"]: row for row in column["rows"]}
            metric = METRICS[column["metric"]]
            heads += [column["name"], "rank", *(["paper", "rank"] if compared else [])]
            for name, line in zip(names, lines, strict=True):
                paper = self.figures[column["name"]].get(name)
                line += _cells(found.get(name), metric, paper, compared)
            agreement = column["correlation"]
            last += ["" if agreement is None else f"{agreement:.2f}", "", "", ""]
        group = 4 if compared else 2
        if compared:
            lines.append(last)
        return Table(self.title, heads, lines, self._note(columns, compared), group)

    def _note(self, columns: Sequence[Mapping[str, Any]], compared: bool) -> str:
        counts = sorted({row["seeds"] for column in columns for row in column["rows"]})
        seeds = " to ".join(map(str, counts)) or "no"
        spread = " (standard deviation)" if max(counts, default=0) > 1 else ""
        many = "" if counts == [1] else "s"
        metrics = {column["name"]: METRICS[column["metric"]] for column in columns}
        if len(one := set(metrics.values())) == 1:
            (metric,) = one
            what = f"Mean {self.split} {metric.label} over clients{spread}"
            parts = [f"{what}, {seeds} seed{many}. {metric.better}"]
        else:
            parts = [f"Means over clients{spread}, {seeds} seed{many}."]
            parts += [f"{name}: {self.split} {m.label}. {m.better}" for name, m in metrics.items()]
        if compared:
            where = f" ({self.paper})" if self.paper else ""
            parts += [
                f"Under `paper` is the paper's figure{where}; ranks are among the rows that both"
                " have, and Spearman is the correlation of the two rankings."
            ]
        parts += [f"{name}: {note}." for name, note in self.notes.items() if note]
        return " ".join(parts)

    def _rows(self, column: str) -> list[dict[str, Any]]:
        """The rows that have results, with ranks among those that can be compared."""
        comparison = self._comparison(column)
        rows, metric = comparison.summary(), comparison.metric
        names, paper = [row.pop("method") for row in rows], self.figures[column]
        ours = {name: row[metric.key] for name, row in zip(names, rows, strict=True)}
        found: Frame = pd.DataFrame({"ours": ours, "paper": paper}, names, dtype=float)
        both = found.dropna() if found["paper"].notna().any() else found
        order = both.map(metric.order).round(ALIKE)
        # 0 stands for none.
        ranks = order.rank(method="min").reindex(names).fillna(0).astype(int)
        return [
            {
                "row": name,
                **row,
                "rank": int(ranks["ours"][name]) or None,
                "paper": paper.get(name),
                "paper_rank": int(ranks["paper"][name]) or None,
            }
            for name, row in zip(names, rows, strict=True)
        ]


def correlation(rows: Sequence[Mapping[str, Any]], metric: Metric = PERPLEXITY) -> float | None:
    """Spearman's rank correlation of our figures with the paper's, where there are both.

    None if it is not defined: fewer than two such rows, or all alike on one side.
    """
    found: Frame = pd.DataFrame(rows, columns=[metric.key, "paper"], dtype=float).dropna()
    agreement = float(found.round(ALIKE).corr(method="spearman").iloc[0, 1])
    return None if isnan(agreement) else agreement


def _cells(
    row: Mapping[str, Any] | None, metric: Metric, figure: float | None, compared: bool
) -> list[str]:
    """One row's cells in one column; nothing of ours where it has not run."""
    ours, ranks = "", ["", ""]
    if row is not None:
        ours = with_spread(row, metric)
        ranks = ["" if row[key] is None else str(row[key]) for key in ("rank", "paper_rank")]
    if not compared:
        return [ours, ranks[0]]
    return [ours, ranks[0], "" if figure is None else f"{figure:.2f}", ranks[1]]

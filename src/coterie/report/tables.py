"""Tables of results: on screen, in Markdown, and as plain data for JSON."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich.markup import escape
from rich.table import Table as RichTable

Result = Mapping[str, Any]
"""What a run's result.json holds."""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows of text whose first cell names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> RichTable:
        """For the screen."""
        table = RichTable(title=escape(self.title), caption=escape(self.note) or None)
        for number, column in enumerate(self.columns):
            words = any(re.search("[a-z]{2}", row[number]) for row in self.rows)
            table.add_column(escape(column), justify="left" if words else "right")
        for row in self.rows:
            table.add_row(*(escape(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """For a page."""
        heads = "| " + " | ".join(self.columns) + " |"
        rule = "| --- |" + " ---: |" * (len(self.columns) - 1)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        note = ["", self.note] if self.note else []
        return "\n".join([f"**{self.title}**", "", heads, rule, *rows, *note, ""])


def scores(result: Result) -> dict[str, dict[str, float]]:
    """The scores that a method reports, by client."""
    return result[result["reports"]]


def mean(result: Result, figure: str) -> float:
    """A figure's mean over clients."""
    return fmean(score[figure] for score in scores(result).values())


def run_table(results: Mapping[str, Result]) -> Table:
    """Perplexity and bits per byte, a row per client, two columns per method."""
    clients = sorted({client for result in results.values() for client in scores(result)})
    columns = ["client"]
    for method in results:
        columns += [f"{method} ppl", "bits/B"]
    rows = []
    for client in clients:
        row = [client]
        for result in results.values():
            score = scores(result)[client]
            row += [f"{score['perplexity']:.2f}", f"{score['bits_per_byte']:.3f}"]
        rows.append(row)
    last = ["mean"]
    for result in results.values():
        last += [f"{mean(result, 'perplexity'):.2f}", f"{mean(result, 'bits_per_byte'):.3f}"]
    note = "ppl: perplexity per token; bits/B: bits per byte of text. Less is better."
    return Table("Each client's model on its own test text", columns, [*rows, last], note)


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same data: results by method, one per seed."""

    name: str
    results: Mapping[str, Sequence[Result]]

    def summary(self) -> list[dict[str, Any]]:
        """Per method: perplexity per client, mean over clients, its mean and deviation over seeds."""
        rows = [self._row(method, results) for method, results in self.results.items()]
        best_first = sorted(rows, key=lambda row: row["perplexity"])
        for row in rows:
            row["rank"] = 1 + best_first.index(row)
        return rows

    def table(self) -> Table:
        """A row per method, in the given order."""
        rows = self.summary()
        clients = list(rows[0]["clients"]) if rows else []
        seeds = max((len(results) for results in self.results.values()), default=0)
        return Table(
            f"{self.name}: test perplexity",
            ["method", *clients, "mean (std)" if seeds > 1 else "mean", "bits/byte", "rank"],
            [
                [
                    row["method"],
                    *(f"{row['clients'][client]:.2f}" for client in clients),
                    f"{row['perplexity']:.2f}" + (f" ({row['std']:.2f})" if seeds > 1 else ""),
                    f"{row['bits_per_byte']:.3f}",
                    str(row["rank"]),
                ]
                for row in rows
            ],
            f"Mean over clients; {seeds} seed{'s' if seeds != 1 else ''}.",
        )

    def _row(self, method: str, results: Sequence[Result]) -> dict[str, Any]:
        means = [mean(result, "perplexity") for result in results]
        return {
            "method": method,
            "clients": {
                client: fmean(scores(result)[client]["perplexity"] for result in results)
                for client in scores(results[0])
            },
            "perplexity": fmean(means),
            "std": stdev(means) if len(means) > 1 else 0.0,
            "bits_per_byte": fmean(mean(result, "bits_per_byte") for result in results),
            "seeds": len(results),
            "trained": fmean(_mean_at(result, "trained") for result in results),
            "aggregated": fmean(_mean_at(result, "aggregated") for result in results),
        }


def _mean_at(result: Result, point: str) -> float:
    return fmean(score["perplexity"] for score in result[point].values())

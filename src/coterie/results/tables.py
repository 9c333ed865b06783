"""Tables of results: on screen, in Markdown, and as plain data for JSON."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from coterie.federation import EVERYONE
from coterie.results.frame import Column, Frame, Result, over_runs, scores, std
from coterie.scoring.metrics import PERPLEXITY, Metric, metric_of

Summary = Mapping[str, Any]
"""What a table shows, or a part of it, as plain data that JSON can hold."""
KEPT = "the round whose model is kept, by validation loss; 0: the base as it came."
ALIKE = 12
"""Decimals to which figures must be the same to rank the same: what follows is rounding."""


@dataclass(frozen=True)
class Table:
    """A title, column heads, and rows of text whose first cell names the row.

    It prints itself on a rich console; where its figures do not fit side by side, part by part.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    group: int = 1
    """After the first, so many columns at a time stay together."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For the screen: text is wrapped, figures never are."""
        yield ""
        yield Text(self.title, style="bold")
        for part in self._parts(options.max_width):
            table = RichTable(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
            )
            for number in part:
                words = self._is_text(number)
                head = Text(self.columns[number])
                table.add_column(head, justify="left" if words else "right", no_wrap=not words)
            for row in self.rows:
                table.add_row(*(Text(row[number]) for number in part))
            yield table
        if self.note:
            yield Text(self.note, style="italic")

    def _is_text(self, number: int) -> bool:
        return number == 0 or any(re.search("[a-z]{2}", row[number]) for row in self.rows)

    def _width(self, number: int) -> int:
        """Characters that a column needs: its longest cell, less where text can be wrapped."""
        cells = [self.columns[number], *(row[number] for row in self.rows)]
        longest = max(map(len, cells))
        return min(longest, 16) if self._is_text(number) else longest

    def _parts(self, width: int) -> Iterator[list[int]]:
        """The columns, the first before each lot that fits into a width."""
        part = [0]
        for first in range(1, len(self.columns), self.group):
            group = range(first, min(first + self.group, len(self.columns)))
            # Between two columns stand three characters.
            if len(part) > 1 and sum(self._width(n) + 3 for n in (*part, *group)) - 2 > width:
                yield part
                part = [0]
            part += group
        yield part

    def markdown(self) -> str:
        """For a page."""
        heads = "| " + " | ".join(self.columns) + " |"
        text = map(self._is_text, range(len(self.columns)))
        rule = "|" + "".join(" --- |" if words else " ---: |" for words in text)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        note = ["", self.note] if self.note else []
        return "\n".join([f"**{self.title}**", "", heads, rule, *rows, *note, ""])


def table_rows(figures: Frame, form: str) -> list[list[str]]:
    """Of a frame: the name of each row, then its figures in a form such as ".2f"; none is empty."""
    cells = figures.map(lambda figure: format(figure, form), na_action="ignore").fillna("")
    return [list(map(str, row)) for row in cells.itertuples(name=None)]


def mean(result: Result, key: str) -> float:
    """A metric's mean over clients."""
    return float(scores(result)[key].mean())


def server_score(result: Result) -> Mapping[str, float] | None:
    """The score of the server's own model, where it has one."""
    return result.get("server")


def shown_of(results: Iterable[Result], asked: str | None = None) -> Metric:
    """What to show of results, of which the server's scores are a part; see `metric_of`."""
    found = [(result[result["reports"]].values(), server_score(result)) for result in results]
    return metric_of((s for clients, server in found for s in (*clients, server) if s), asked)


def run_table(
    results: Mapping[str, Result], split: str = "test", asked: str | None = None
) -> Table:
    """A row per client and a column per method; then the means; then the server, if it has a model.

    Cells are perplexity and bits per byte, or the one metric that suits the data or that is `asked`
    for (see `metric_of`); of a share, its standard deviation over clients follows the mean. Where
    clients keep their best models, their rounds stand in brackets.
    """
    metric = shown_of(results.values(), asked)
    pair = metric is PERPLEXITY
    found = [scores(result) for result in results.values()]
    clients = sorted({client for one in found for client in one.index})
    kept = [result.get("kept", {}) for result in results.values()]
    pairs = list(zip(found, kept, strict=True))
    rows = [
        [name, *(_cell(one.loc[name], metric) + _of_round(rounds, name) for one, rounds in pairs)]
        for name in clients
    ]
    rows.append(["mean", *(_cell(one.mean(), metric) for one in found)])
    if metric.share and len(clients) > 1:
        rows.append(["std over clients", *(metric.cell(std(one[metric.key])) for one in found)])
    note, served = metric.better, [server_score(result) for result in results.values()]
    if any(served):
        rows.append(["server", *(_cell(score, metric) if score else "" for score in served)])
        note += " The mean excludes the server."
    if any(kept):
        note += f" In brackets: {KEPT}"
    what = "perplexity per token / bits per byte" if pair else metric.label
    title = f"Each client's model on its own {split} text: {what}"
    return Table(title, ["client", *results], rows, note)


def _cell(score: Mapping[str, float] | Column, metric: Metric) -> str:
    cell = metric.cell(score[metric.key])
    return f"{cell} / {score['bits_per_byte']:.3f}" if metric is PERPLEXITY else cell


def _of_round(kept: Mapping[str, int], client: str) -> str:
    """The round that a client's model is of, where known; a pooled run's one client has a name of
    its own."""
    round = kept.get(client, kept.get(EVERYONE))
    return "" if round is None else f" ({round})"


@dataclass(frozen=True)
class Comparison:
    """Several methods on the same data: results by method, one per seed."""

    name: str
    results: Mapping[str, Sequence[Result]]
    split: str = "test"
    """Which text the models are scored on: test or validation."""
    asked: str | None = None
    """What is asked for of the scores; see `metric_of`."""

    @property
    def metric(self) -> Metric:
        """What is shown of the scores."""
        return shown_of((r for results in self.results.values() for r in results), self.asked)

    def summary(self) -> list[dict[str, Any]]:
        """Per method: its metric per client; over clients, the mean and the standard deviation
        (`spread`); over seeds, the mean's (`std`) and each client's (`clients_std`).

        The metric's key (perplexity, accuracy) holds the mean. Shares are from 0 to 1. `server` has
        that key, `std` and `seeds` of the server's own model, which is in no mean, or is None.
        `kept` is, per client, the round whose model it keeps, a list over seeds; empty where all
        keep the last.
        """
        metric = self.metric
        rows = [self._row(name, results, metric.key) for name, results in self.results.items()]
        best_first = sorted(rows, key=lambda row: round(metric.order(row[metric.key]), ALIKE))
        for row in rows:
            row["rank"] = 1 + best_first.index(row)
        return rows

    def table(self) -> Table:
        """A row per method, in the given order; see `clients_table`."""
        rows = {row["method"]: row for row in self.summary()}
        return clients_table(f"{self.name}: {self.split} {self.metric.label}", self.metric, rows)

    def _row(self, method: str, results: Sequence[Result], key: str) -> dict[str, Any]:
        own = over_runs(results)
        clients = own.groupby("client", sort=False)[key].agg(["mean", "std"]).fillna(0.0)
        means = own.groupby("run").mean()
        served = pd.Series([score[key] for score in map(server_score, results) if score])
        return {
            "method": method,
            "clients": clients["mean"].to_dict(),
            "clients_std": clients["std"].to_dict(),
            "spread": std(clients["mean"]),
            **_over_seeds(means[key], key),
            "server": _over_seeds(served, key) if len(served) else None,
            "bits_per_byte": float(means["bits_per_byte"].mean()),
            "trained": _mean_at("trained", results, key),
            "aggregated": _mean_at("aggregated", results, key),
            "kept": _kept(results),
        }


def _over_seeds(values: Column, key: str) -> dict[str, float]:
    """A metric of one model, or a mean over models, per seed: its mean and standard deviation."""
    return {key: float(values.mean()), "std": std(values), "seeds": len(values)}


def _kept(results: Sequence[Result]) -> dict[str, list[int]]:
    known = [result["kept"] for result in results if "kept" in result]
    return {client: [kept[client] for kept in known] for client in known[0]} if known else {}


def _mean_at(point: str, results: Sequence[Result], key: str) -> float:
    return float(over_runs(results, point)[key].groupby("run").mean().mean())


def clients_table(title: str, metric: Metric, rows: Mapping[str, Summary]) -> Table:
    """Each client's score by method, the mean, and the rank; a server's model comes last.

    rows: a method's entry in `Comparison.summary`, by its name. Columns of which nothing is known
    are left out. Beside a server, clients' cells have standard deviations over seeds, too.
    """
    entries = list(rows.values())
    counts = sorted({row["seeds"] for row in entries})  # they differ while it is under way
    spread = any(count > 1 for count in counts)
    served = any(row["server"] for row in entries)
    beside = "bits/byte" if metric is PERPLEXITY else "over clients"
    columns = [
        ("method", list(rows)),
        *(
            (client, [_of_client(row, client, metric, served) for row in entries])
            for client in entries[0]["clients"]
        ),
        ("mean (std)" if spread else "mean", [with_spread(row, metric) for row in entries]),
        (beside, [_beside_mean(row, metric) for row in entries]),
        ("rank", [str(row["rank"]) for row in entries]),
        ("kept", [_rounds(row) for row in entries]),
        ("server", [_of_server(row, metric) for row in entries]),
    ]
    known = [(head, cells) for head, cells in columns if any(cells)]
    seeds = f"{' to '.join(map(str, counts))} seed{'s' if spread else ''}"
    aside = " Mean and rank exclude the server." if served else ""
    if any(map(_rounds, entries)):
        aside += f" Kept: {KEPT}"
    return Table(
        title,
        [head for head, _ in known],
        [list(row) for row in zip(*(cells for _, cells in known), strict=True)],
        f"Mean over clients; {seeds}. {metric.better}{aside}",
    )


def _of_client(row: Summary, client: str, metric: Metric, spread: bool) -> str:
    """A client's cell, with its standard deviation over seeds if wanted."""
    own = {metric.key: row["clients"][client], "seeds": 1}
    if spread:
        own |= {"std": row["clients_std"][client], "seeds": row["seeds"]}
    return with_spread(own, metric)


def _beside_mean(row: Summary, metric: Metric) -> str:
    """Perplexity in bits per byte; of a share, its standard deviation over clients, where known."""
    if metric is PERPLEXITY:
        return f"{row['bits_per_byte']:.3f}"
    return f"± {metric.cell(row['spread'])}" if "spread" in row else ""


def _rounds(row: Summary) -> str:
    """The first and the last of the rounds whose models are kept; empty where none is known."""
    rounds = sorted({round for kept in row.get("kept", {}).values() for round in kept})
    return "-".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))) if rounds else ""


def _of_server(row: Mapping[str, Any], metric: Metric) -> str:
    """The server's cell; empty where it has no model of its own."""
    return with_spread(row["server"], metric) if row["server"] else ""


def with_spread(row: Mapping[str, Any], metric: Metric) -> str:
    """A metric's mean and, of several seeds, its standard deviation."""
    spread = f" ({metric.cell(row['std'])})" if row["seeds"] > 1 else ""
    return metric.cell(row[metric.key]) + spread

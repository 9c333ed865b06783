"""Tables of results for terminals, notebooks and Markdown."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from coterie.analysis.frame import Column, Frame, Result, scores, std
from coterie.analysis.significance import COMMONEST, has_floor
from coterie.evaluation.metrics import Metric, metric_of
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.federation.participants import EVERYONE

Summary = Mapping[str, Any]
"""The content of a table or of a row, as plain data that can be written as JSON."""
NAMED = re.compile(r" \(\S+\)$")
"""A pattern that matches a client's name in brackets at the end of a cell."""
KEPT = "the round with the best validation score, whose model was kept (0: the untrained base)."

DRIFT = (
    "Drift: how far a model has moved from its base on general requests, in nats per token; above "
    "1, it has forgotten much."
)


@dataclass(frozen=True, repr=False)
class Table:
    """A table whose cells are strings, with a title and an optional note.

    The first cell of a row is the name of the row. If a table is printed with the library Rich
    and is too wide for the console, its narrower form is printed instead. If it has none, it is
    split into several blocks of columns.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    group: int = 1
    """The number of consecutive columns, after the first column, that always stay in one block."""
    narrower: "Table | None" = None
    """The table without its least important figures."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for a terminal. Columns of words can wrap; columns of numbers cannot."""
        blocks = list(self._blocks(options.max_width))
        if len(blocks) > 1 and self.narrower is not None:
            yield self.narrower
            return
        yield ""
        yield Text(self.title, style="bold")
        for block in blocks:
            table = RichTable(
                box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0)
            )
            for number in block:
                is_text = self._is_text(number)
                head = Text(self.columns[number])
                table.add_column(head, justify="left" if is_text else "right", no_wrap=not is_text)
            for row in self.rows:
                table.add_row(*(Text(row[number]) for number in block))
            yield table
        if self.note:
            yield Text(self.note, style="italic")

    def _is_text(self, number: int) -> bool:
        cells = (NAMED.sub("", row[number]) for row in self.rows)
        return number == 0 or any(re.search("[a-z]{2}", cell) for cell in cells)

    def _width(self, number: int) -> int:
        """Return a column's width in characters, at most 16 if the column contains words."""
        longest = max(len(row[number]) for row in (self.columns, *self.rows))
        return min(longest, 16) if self._is_text(number) else longest

    def _blocks(self, width: int) -> Iterator[list[int]]:
        """Yield the blocks in which the table is printed, as lists of column numbers.

        Every block contains the first column and, if possible, fits into `width` characters.
        """
        block = [0]
        for first in range(1, len(self.columns), self.group):
            group = range(first, min(first + self.group, len(self.columns)))
            # Rich separates two columns by three characters.
            if len(block) > 1 and sum(self._width(n) + 3 for n in (*block, *group)) - 2 > width:
                yield block
                block = [0]
            block += group
        yield block

    def without(self, column: str) -> "Table":
        """Return the table without a column."""
        number = list(self.columns).index(column)
        columns, *rows = ([*row[:number], *row[number + 1 :]] for row in (self.columns, *self.rows))
        return replace(self, columns=columns, rows=rows)

    def __repr__(self) -> str:
        """Return the table's title and the number of its rows."""
        return f"Table({self.title!r}, rows={len(self.rows)})"

    def __str__(self) -> str:
        """Return the table as Markdown, so that `print` shows it."""
        return self.markdown()

    def _repr_html_(self) -> str:
        """Return the table as HTML for a notebook, with every cell escaped."""
        sides = ["left" if self._is_text(n) else "right" for n in range(len(self.columns))]
        rows = [("th", self.columns), *(("td", row) for row in self.rows)]
        lines = []
        for tag, row in rows:
            cells = (
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(row, sides, strict=True)
            )
            lines.append(f"<tr>{''.join(cells)}</tr>")
        note = f"<p>{marked_up(self.note)}</p>" if self.note else ""
        return f"<table><caption>{marked_up(self.title)}</caption>{''.join(lines)}</table>{note}"

    def markdown(self) -> str:
        """Return the table as Markdown."""
        heads = "| " + " | ".join(self.columns) + " |"
        texts = map(self._is_text, range(len(self.columns)))
        rule = "|" + "".join(" --- |" if is_text else " ---: |" for is_text in texts)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        note = ["", self.note] if self.note else []
        return "\n".join([f"**{self.title}**", "", heads, rule, *rows, *note, ""])


def marked_up(text: str) -> str:
    """Return text as HTML, in which words between backticks are marked as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def frame_table(title: str, corner: str, figures: Frame, form: str) -> Table:
    """Return a frame as a table, with empty cells for missing values.

    Args:
        title: The table's title.
        corner: The heading of the first column, which contains the names of the rows.
        figures: A frame of values. The frame's index contains the names of the rows, and the
            frame's columns have the names of the table's columns.
        form: The format specification of a value, such as ".2f".
    """
    cells = figures.map(lambda value: format(value, form), na_action="ignore").fillna("")
    rows = [list(map(str, row)) for row in cells.itertuples(name=None)]
    return Table(title, [corner, *map(str, figures)], rows)


def shown_of(results: Iterable[Result], asked: str | None = None) -> Metric:
    """Return the metric to show in a table of several results.

    Args:
        results: The results. The scores of servers' own models are considered, too.
        asked: The name of the metric; None selects the metric that suits the scores (`metric_of`).
    """
    by_run = [[*result[result["reports"]].values(), result.get("server")] for result in results]
    return metric_of((score for scores in by_run for score in scores if score), asked)


def run_table(
    results: Mapping[str, Result],
    split: str = "test",
    asked: str | None = None,
    floor: Result | None = None,
    bits: bool = True,
) -> Table:
    """Return a table of one run and its baselines, with a row per client and a column per method.

    If the metric is perplexity, a cell contains the perplexity followed by the bits per byte, which
    a narrow console omits. Otherwise, it contains the value of the metric. The rows below the
    clients contain the means, each method's worst client, the standard deviation over clients (not
    for perplexity), and the score of the server's model if the server has one. If clients keep
    their best models, the number in brackets after a score is the round of the kept model.

    Args:
        results: The result of each method.
        split: The split on which models were scored, "test" or "validation".
        asked: The name of the metric; None selects the metric that suits the data (`metric_of`).
        floor: The scores of always giving the commonest answer, for the last column; see
            `coterie.engines.floor`. None omits the column.
        bits: Whether perplexities are followed by bits per byte.
    """
    metric = shown_of(results.values(), asked)
    bits = bits and metric is PERPLEXITY
    narrower = run_table(results, split, asked, floor, bits=False) if bits else None
    if floor is not None and has_floor([floor], metric):
        results = {**results, COMMONEST: floor}
    frames = [scores(result) for result in results.values()]
    clients = sorted({client for frame in frames for client in frame.index})
    kept = [result.get("kept", {}) for result in results.values()]

    def cell(score: Mapping[str, float] | Column, remark: str | int | None = None) -> str:
        text = metric.cell(score[metric.name])
        text += f" / {score['bits_per_byte']:.3f}" if bits else ""
        return text if remark is None else f"{text} ({remark})"

    rows: list[list[str]] = []
    for name in clients:
        # A pooled run has one client, EVERYONE.
        rounds = [k.get(name, k.get(EVERYONE)) for k in kept]
        rows.append([name, *(cell(f.loc[name], n) for f, n in zip(frames, rounds, strict=True))])
    rows.append(["mean", *(cell(frame.mean()) for frame in frames)])
    if len(clients) > 1:
        worst = [worst_of(frame[metric.name], metric) for frame in frames]
        cells = (cell(f.loc[name], name) for f, name in zip(frames, worst, strict=True))
        rows.append(["worst client", *cells])
    if metric is not PERPLEXITY and len(clients) > 1:
        deviations = [std(frame[metric.name]) for frame in frames]
        rows.append(["std over clients", *map(metric.cell, deviations)])
    note, served = metric.better, [result.get("server") for result in results.values()]
    if any(served):
        rows.append(["server", *(cell(score) if score else "" for score in served)])
        note += " The mean excludes the server."
    if any("drift" in result for result in results.values()):
        rows.append(["drift", *map(mean_drift, results.values())])
        note += f" {DRIFT}"
    if any(kept):
        note += f" In brackets: {KEPT}"
    note += "".join(f" {text}" for text in left_out(results))
    label = "perplexity per token / bits per byte" if bits else metric.label
    title = f"Each client's model on its own {split} text: {label}"
    return Table(title, ["client", *results], rows, note, narrower=narrower)


def mean_drift(result: Result) -> str:
    """Return the mean drift over clients as the text of a cell, or "" if it was not measured."""
    drift = result.get("drift")
    return f"{fmean(drift.values()):.2f}" if drift else ""


def worst_of(scores: Mapping[str, float], metric: Metric) -> str:
    """Return the client with the worst score. In a tie, return the first of the tied clients."""
    return max(scores.keys(), key=lambda client: metric.order(scores[client]))


def left_out(results: Mapping[str, Result]) -> Iterator[str]:
    """Yield sentences on clients that were excluded from rounds of a run.

    There is a sentence for each pair of a method and an excluded client.
    """
    for method, result in results.items():
        for client, rounds in result.get("left_out", {}).items():
            reason, number = list(rounds.values())[-1], len(rounds)
            count = "one round" if number == 1 else f"{number} rounds"
            yield f"{client} was excluded from {count} of {method}: {reason}."


def listed(names: Iterable[str]) -> str:
    """Join names with commas and `and`, as in a sentence: `a, b and c`."""
    parts = list(names)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

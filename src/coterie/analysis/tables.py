"""Tables of results: on screen, in Markdown, and as plain data for JSON."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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
"""What a table shows, or a part of it, as plain data that JSON can hold."""
NAMED = re.compile(r" \(\S+\)$")
"""After a figure, whose it is."""
KEPT = "the round whose model is kept, by validation text; 0: the base as it came."


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
        cells = (NAMED.sub("", row[number]) for row in self.rows)
        return number == 0 or any(re.search("[a-z]{2}", cell) for cell in cells)

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

    def _repr_html_(self) -> str:
        """Return the table for a notebook, with every cell escaped."""
        rows = [("th", self.columns), *(("td", row) for row in self.rows)]
        lines = (
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
            for tag, cells in rows
        )
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<table><caption>{escape(self.title)}</caption>{''.join(lines)}</table>{note}"

    def markdown(self) -> str:
        """For a page."""
        heads = "| " + " | ".join(self.columns) + " |"
        text = map(self._is_text, range(len(self.columns)))
        rule = "|" + "".join(" --- |" if words else " ---: |" for words in text)
        rows = ["| " + " | ".join(row) + " |" for row in self.rows]
        note = ["", self.note] if self.note else []
        return "\n".join([f"**{self.title}**", "", heads, rule, *rows, *note, ""])


def frame_table(title: str, corner: str, figures: Frame, form: str) -> Table:
    """Return a frame as a table, with figures in a form such as ".2f"; a missing one is empty.

    Args:
        title: the table's title.
        corner: the head of the column that names the rows.
        figures: a frame whose rows and columns are named.
        form: as `format` takes it.
    """
    cells = figures.map(lambda figure: format(figure, form), na_action="ignore").fillna("")
    rows = [list(map(str, row)) for row in cells.itertuples(name=None)]
    return Table(title, [corner, *map(str, figures)], rows)


def shown_of(results: Iterable[Result], asked: str | None = None) -> Metric:
    """What to show of results, of which the server's scores are a part; see `metric_of`."""
    found = [[*result[result["reports"]].values(), result.get("server")] for result in results]
    return metric_of((score for scores in found for score in scores if score), asked)


def run_table(
    results: Mapping[str, Result],
    split: str = "test",
    asked: str | None = None,
    floor: Result | None = None,
) -> Table:
    """A row per client and a column per method; then the means; then the server, if it has a model.

    Cells are perplexity and bits per byte, or the one metric that suits the data or that is `asked`
    for (see `metric_of`). After the means comes each method's worst client and, except for
    perplexity, the standard deviation over clients. Where clients keep their best models, their
    rounds stand in brackets. A floor of that metric (see `coterie.engines.floor`) is the last
    column.
    """
    metric = shown_of(results.values(), asked)
    if floor is not None and has_floor([floor], metric):
        results = {**results, COMMONEST: floor}
    found = [scores(result) for result in results.values()]
    clients = sorted({client for one in found for client in one.index})
    kept = [result.get("kept", {}) for result in results.values()]
    pairs = list(zip(found, kept, strict=True))
    rows = [
        [name, *(_cell(one.loc[name], metric) + _of_round(rounds, name) for one, rounds in pairs)]
        for name in clients
    ]
    rows.append(["mean", *(_cell(one.mean(), metric) for one in found)])
    if len(clients) > 1:
        worst = [worst_of(one[metric.name], metric) for one in found]
        cells = [f"{_cell(one.loc[w], metric)} ({w})" for one, w in zip(found, worst, strict=True)]
        rows.append(["worst client", *cells])
    if metric is not PERPLEXITY and len(clients) > 1:
        rows.append(["std over clients", *(metric.cell(std(one[metric.name])) for one in found)])
    note, served = metric.better, [result.get("server") for result in results.values()]
    if any(served):
        rows.append(["server", *(_cell(score, metric) if score else "" for score in served)])
        note += " The mean excludes the server."
    if any(kept):
        note += f" In brackets after a client's score: {KEPT}"
    note += "".join(f" {text}" for text in left_out(results))
    what = metric.label if metric is not PERPLEXITY else "perplexity per token / bits per byte"
    title = f"Each client's model on its own {split} text: {what}"
    return Table(title, ["client", *results], rows, note)


def worst_of(scores: Mapping[str, float], metric: Metric) -> str:
    """Return the client with the worst score; of equals, the first."""
    return max(scores.keys(), key=lambda client: metric.order(scores[client]))


def left_out(results: Mapping[str, Result]) -> Iterator[str]:
    """A sentence for each client of whom some uploads did not count."""
    for method, result in results.items():
        for client, rounds in result.get("left_out", {}).items():
            last, times = list(rounds.values())[-1], len(rounds)
            often = "a round" if times == 1 else f"{times} rounds"
            yield f"{client} was left out of {often} of {method}: {last}."


def _cell(score: Mapping[str, float] | Column, metric: Metric) -> str:
    cell = metric.cell(score[metric.name])
    return f"{cell} / {score['bits_per_byte']:.3f}" if metric is PERPLEXITY else cell


def _of_round(kept: Mapping[str, int], client: str) -> str:
    """The round that a client's model is of, where known; a pooled run's one client has a name of
    its own."""
    round = kept.get(client, kept.get(EVERYONE))
    return "" if round is None else f" ({round})"


def listed(names: Iterable[str]) -> str:
    """Names in a sentence: `a, b and c`."""
    found = list(names)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)

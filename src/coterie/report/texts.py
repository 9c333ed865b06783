"""Texts with every token coloured by the expert that its router scores highest.

Rows are texts, columns are clients' models (CoMiGS, figures 2, 14-19). Clients' texts are private,
so a report holds them only where it is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from coterie.analysis.tables import Table
from coterie.analysis.texts import LENGTH, Coloured
from coterie.errors import CoterieError
from coterie.files import path_part
from coterie.report.style import Canvas, LeftOut, Picture

TINTS = {
    "light": ("#ffd0a8", "#bcdcf5", "#bfe8d2", "#f3cbe5", "#f2e3a0", "#d9d2f5", "#d7dade"),
    "dark": ("#7d4213", "#1d4e79", "#17604a", "#74345c", "#665300", "#4b3c86", "#4a525d"),
}
"""Backgrounds by expert, on which the page's ink is read well; the first is the paper's orange."""


@dataclass(frozen=True, eq=False)
class TextPicture(Picture):
    """Texts by models, at one layer, which a page shows as text."""

    texts: Sequence[Coloured] = ()

    @property
    def rows(self) -> list[str]:
        """Whose texts."""
        return list(dict.fromkeys(one.text_of for one in self.texts))

    @property
    def columns(self) -> list[str]:
        """Whose models."""
        return list(dict.fromkeys(one.model_of for one in self.texts))

    @property
    def experts(self) -> Sequence[str]:
        """Of the client with the most."""
        return max((one.experts for one in self.texts), key=len)

    def cell(self, text_of: str, model_of: str) -> Coloured | None:
        """A text as a model routes it; None where the model cannot read it."""
        found = (t for t in self.texts if (t.text_of, t.model_of) == (text_of, model_of))
        return next(found, None)


def texts(
    found: Mapping[str, Sequence[Coloured] | CoterieError],
) -> Iterator[TextPicture | LeftOut]:
    """Yield a picture for each label with routers, and each of its layers: all texts by all models.

    Args:
        found: see `coloured_texts`.
    """
    if not found:
        yield LeftOut("Experts of each token", "no run has routers over a fixed set of experts")
    for label, coloured in found.items():
        title = f"Experts of each token, {label}"
        if isinstance(coloured, CoterieError):
            yield LeftOut(title, str(coloured))
        elif not coloured:
            yield LeftOut(title, "every client keeps the base as it came, which has no experts")
        else:
            for place in dict.fromkeys(one.layer for one in coloured):
                yield _picture(label, place, [one for one in coloured if one.layer == place])


def _picture(label: str, place: str, coloured: Sequence[Coloured]) -> TextPicture:
    grid = TextPicture(
        f"texts-{path_part(label)}-{path_part(place)}",
        f"Experts of each token, {label}, {place}",
        f"The first {LENGTH} tokens (approximately) of each text, as each client's model reads "
        "them. The background colour shows the expert with the highest router score.",
        "Texts with coloured tokens, by the clients whose models read them.",
        lambda canvas: _draw(canvas, grid),
        _shares(place, coloured),
        texts=coloured,
    )
    return grid


def _shares(place: str, coloured: Sequence[Coloured]) -> Table:
    """A row per text, a column per model."""
    models = list(dict.fromkeys(one.model_of for one in coloured))
    rows: dict[str, dict[str, str]] = {}
    for one in coloured:
        share = sum(v for name, v in one.shares().items() if name.startswith("generalist"))
        if not any(name.startswith("generalist") for name in one.experts):
            share = one.shares()[one.experts[0]]
        rows.setdefault(one.text_of, {})[one.model_of] = f"{share:.0%}"
    return Table(
        f"Share of tokens whose first expert is a generalist, {place}",
        ["text", *models],
        [[name, *(cells.get(model, "") for model in models)] for name, cells in rows.items()],
        "Columns: whose model. Of clients without generalists, the share of expert 1.",
    )


SIZE = 8.5
"""Points of the type in a picture of texts."""
WIDE = 0.602 * SIZE / 72
"""Inches of a character of DejaVu Sans Mono."""
HIGH = 1.65 * SIZE / 72
"""Inches from line to line."""


PANEL, SIDE = 2.6, 0.45
"""Inches of a panel's width, and of what stands left of all panels."""


def _draw(canvas: Canvas, grid: TextPicture) -> Figure:
    """As many panels as there are texts by models; wider than the page if there are many."""
    tints = TINTS[canvas.theme.name]
    across = int((PANEL - 0.15) / WIDE)
    laid = {(one.text_of, one.model_of): list(_lay_out(one.pieces, across)) for one in grid.texts}
    tall = {
        row: max(
            2 + max(cells[-1][0] for (text, _), cells in laid.items() if text == row and cells),
            ceil(0.09 * len(row) / HIGH) + 1,  # its name stands beside it, turned
        )
        for row in grid.rows
    }
    wide, high = SIDE + PANEL * len(grid.columns), HIGH * (sum(tall.values()) + 3)
    figure = canvas.figure(high)
    figure.set_figwidth(wide)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, wide)
    axis.set_ylim(high, -0.05)
    axis.axis("off")
    plain = {"va": "center", "fontsize": SIZE + 0.5, "weight": "bold", "parse_math": False}
    left = SIDE
    for n, name in enumerate(grid.experts):
        _cell(axis, 0, left, f" {name} ", tints[n % len(tints)])
        left += (len(name) + 4) * WIDE
    for n, model in enumerate(grid.columns):
        axis.text(SIDE + n * PANEL, 2 * HIGH, f"{model}'s model", **plain)
    top = 3 * HIGH
    for row in grid.rows:
        middle = top + (tall[row] - 1) * HIGH / 2
        axis.text(SIDE / 2, middle, row, rotation=90, ha="center", **plain)
        for n, model in enumerate(grid.columns):
            for line, column, text, expert in laid.get((row, model), ()):
                where = top + line * HIGH, SIDE + n * PANEL + column * WIDE
                _cell(axis, *where, text, tints[expert % len(tints)])
        top += tall[row] * HIGH
    return figure


def _cell(axis: Axes, top: float, left: float, text: str, tint: str) -> None:
    """Tinted text; top and left in inches."""
    wide, high = len(text) * WIDE, HIGH * 0.92
    axis.add_patch(Rectangle((left, top), wide, high, color=tint, lw=0))
    axis.text(
        left, top + HIGH / 2, text, va="center", fontsize=SIZE,
        family="DejaVu Sans Mono", parse_math=False,
    )  # fmt: skip


def _lay_out(pieces: Iterable[tuple[str, int]], across: int) -> Iterator[tuple[int, int, str, int]]:
    """Line, column, text and expert of every cell of a text that is `across` characters wide."""
    line = column = 0
    for piece, expert in pieces:
        for text in piece.replace("\t", " ").replace("\n", "↵\n").splitlines(keepends=True):
            word = text.rstrip("\n")
            if column and column + len(word) > across:
                line, column = line + 1, 0
            yield line, column, word, expert
            column += len(word)
            if text.endswith("\n"):
                line, column = line + 1, 0

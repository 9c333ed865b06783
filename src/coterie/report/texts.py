"""Texts with every token coloured by the expert that its router scores highest.

Rows are texts, columns are clients' models (CoMiGS, figures 2, 14-19). Clients' texts are private,
so a report holds them only where it is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from matplotlib.figure import Figure
from matplotlib.patches import Patch

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

    texts: Mapping[str, Mapping[str, Coloured]] = field(default_factory=dict)
    """By whose text, then by whose model, of those that can read it."""

    @property
    def columns(self) -> list[str]:
        """Whose models."""
        return list(dict.fromkeys(model for row in self.texts.values() for model in row))

    @property
    def experts(self) -> Sequence[str]:
        """Of the client with the most."""
        every = (one.experts for row in self.texts.values() for one in row.values())
        return max(every, key=len)


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
    rows: dict[str, dict[str, Coloured]] = {}
    for one in coloured:
        rows.setdefault(one.text_of, {})[one.model_of] = one
    models = dict.fromkeys(one.model_of for one in coloured)
    shares = [
        [name, *(f"{row[model].generalists:.0%}" if model in row else "" for model in models)]
        for name, row in rows.items()
    ]
    grid = TextPicture(
        f"texts-{path_part(label)}-{path_part(place)}",
        f"Experts of each token, {label}, {place}",
        f"The first {LENGTH} tokens (approximately) of each text, as each client's model reads "
        "them. The background colour shows the expert with the highest router score.",
        "Texts with coloured tokens, by the clients whose models read them.",
        lambda canvas: _draw(canvas, grid),
        Table(
            f"Share of tokens whose first expert is a generalist, {place}",
            ["text", *models],
            shares,
            "Columns: whose model. Of clients without generalists, the share of expert 1.",
        ),
        rows,
    )
    return grid


SIZE = 8.5
"""Points of the type in a picture of texts."""
WIDE, HIGH = 0.602 * SIZE / 72, 1.65 * SIZE / 72
"""Inches of a character of DejaVu Sans Mono, and from line to line."""
ACROSS = 34
"""Characters of a line of a text."""


def _draw(canvas: Canvas, grid: TextPicture) -> Figure:
    """As many panels as there are texts by models; wider than the page if there are many."""
    tints, rows, columns = TINTS[canvas.theme.name], list(grid.texts), grid.columns
    lines = {
        row: {model: wrapped(one.pieces, ACROSS) for model, one in found.items()}
        for row, found in grid.texts.items()
    }
    # A text's name stands beside it, turned.
    tall = {row: max(1 + len(row) // 3, *map(len, lines[row].values())) for row in rows}
    wide, high = (ACROSS + 3) * WIDE * len(columns), HIGH * sum(tall.values())
    beside, above, between = 0.5, 3.3 * HIGH, 1.2 * HIGH  # inches left, on top, between texts
    figure = canvas.figure(above + high + between * len(rows))
    figure.set_figwidth(beside + wide)
    figure.set_layout_engine("none")  # which fits axes to a figure, and not a figure to its texts
    axes = figure.subplots(
        len(rows), len(columns), squeeze=False, height_ratios=list(tall.values()), gridspec_kw={
            "left": 1 - wide / figure.get_figwidth(), "right": 1 - 3 * WIDE / figure.get_figwidth(),
            "top": 1 - above / figure.get_figheight(), "bottom": between / figure.get_figheight(),
            "wspace": 3 / ACROSS, "hspace": between * len(rows) / high,
        },
    )  # fmt: skip
    for axis, (row, model) in zip(axes.flat, product(rows, columns), strict=True):
        axis.set(xlim=(0, ACROSS), ylim=(tall[row], 0), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
        for n, line in enumerate(lines[row].get(model, ())):
            left = 0
            for text, expert in line:
                axis.barh(n + 0.5, len(text), 0.92, left, color=tints[expert % len(tints)])
                left += len(text)
            axis.text(
                0, n + 0.5, "".join(text for text, _ in line), va="center", fontsize=SIZE,
                family="DejaVu Sans Mono",
            )  # fmt: skip
    for axis, row in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(row, weight="bold")
    for axis, model in zip(axes[0], columns, strict=True):
        axis.set_title(f"{model}'s model", loc="left", fontsize=9)
    keys = [Patch(color=tints[n % len(tints)], label=name) for n, name in enumerate(grid.experts)]
    figure.legend(handles=keys, loc="upper left", ncols=len(keys))
    return figure


def wrapped(pieces: Iterable[tuple[str, int]], across: int) -> list[list[tuple[str, int]]]:
    """Break a text, given in pieces with their experts, into lines of so many characters."""
    lines: list[list[tuple[str, int]]] = [[]]
    for piece, expert in pieces:
        for text in piece.replace("\t", " ").replace("\n", "↵\n").splitlines(keepends=True):
            word = text.rstrip("\n")
            if lines[-1] and sum(len(one) for one, _ in lines[-1]) + len(word) > across:
                lines.append([])
            lines[-1].append((word, expert))
            if text.endswith("\n"):
                lines.append([])
    return lines

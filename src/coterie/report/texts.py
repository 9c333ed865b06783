"""Figure of texts with every token coloured by the expert that the router scores highest.

Rows are texts, and columns are clients' models (CoMiGS, figures 2 and 14-19). Clients' texts are
private, so a report includes this figure only on request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from coterie.analysis.tables import Table
from coterie.analysis.texts import LENGTH, Coloured, ColouredTexts
from coterie.errors import CoterieError
from coterie.files import path_part
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture

TINTS = {
    "light": ("#ffd0a8", "#bcdcf5", "#bfe8d2", "#f3cbe5", "#f2e3a0", "#d9d2f5", "#d7dade"),
    "dark": ("#7d4213", "#1d4e79", "#17604a", "#74345c", "#665300", "#4b3c86", "#4a525d"),
}
"""Background colours of experts in each theme, on which text in the theme's `ink` is legible.

The first colour is the orange of CoMiGS's figures.
"""


@dataclass(frozen=True, eq=False)
class TextPicture(Picture):
    """Texts routed by several models at one layer. The page shows them as text, not as an image."""

    texts: Mapping[str, Mapping[str, Coloured]] = field(default_factory=dict)
    """For each text's name, a mapping from clients to the text as routed by that client's model."""

    @property
    def columns(self) -> list[str]:
        """The names of the clients whose models routed the texts."""
        return list(dict.fromkeys(model for row in self.texts.values() for model in row))

    @property
    def experts(self) -> Sequence[str]:
        """The names of the experts of the client with the most experts."""
        return max((t.experts for row in self.texts.values() for t in row.values()), key=len)


def texts(results: ColouredTexts) -> Iterator[TextPicture | LeftOut]:
    """Yield a figure of routed texts for each label and layer in `results`.

    A label is a method with its settings.

    Args:
        results: The return value of `coloured_texts`.
    """
    if not results:
        reason = "no run recorded routing weights over a fixed set of experts"
        yield LeftOut("Experts of each token", reason)
    for label, coloured in results.items():
        title = f"Experts of each token, {label}"
        if isinstance(coloured, CoterieError):
            yield LeftOut(title, str(coloured))
        elif not coloured:
            yield LeftOut(title, "every client kept the untrained base, which has no experts")
        else:
            for layer in dict.fromkeys(text.layer for text in coloured):
                yield _picture(label, layer, [text for text in coloured if text.layer == layer])


def _picture(label: str, layer: str, coloured: Sequence[Coloured]) -> TextPicture:
    rows: dict[str, dict[str, Coloured]] = {}
    for text in coloured:
        rows.setdefault(text.text_of, {})[text.model_of] = text
    models = dict.fromkeys(text.model_of for text in coloured)
    shares = [
        [name, *(f"{row[model].generalists:.0%}" if model in row else "" for model in models)]
        for name, row in rows.items()
    ]
    grid = TextPicture(
        f"texts-{path_part(label)}-{path_part(layer)}",
        f"Experts of each token, {label}, {layer}",
        f"The first {LENGTH} tokens (approximately) of each text, routed by each client's model. "
        "The background colour shows the expert with the highest router score. "
        f"{SMALLEST_SEED}",
        "Grid of texts with coloured tokens: a row per text, a column per client's model.",
        lambda canvas: _draw(canvas, grid),
        Table(
            f"Share of tokens whose highest-scoring expert is a generalist, {layer}",
            ["text", *models],
            shares,
            "Each column is a client's model, and shows the share of its generalist, or of expert "
            "1 if the model has no generalist.",
        ),
        rows,
    )
    return grid


SIZE = 8.5
"""The font size in points."""
WIDE, HIGH = 0.602 * SIZE / 72, 1.65 * SIZE / 72
"""The width of a character of DejaVu Sans Mono, and the height of a line, in inches."""
ACROSS = 34
"""The maximum number of characters per line."""


def _draw(canvas: Canvas, grid: TextPicture) -> Figure:
    """Draw a panel for each text and model. With many models, the figure is wider than the page."""
    tints, rows, columns = TINTS[canvas.theme.name], list(grid.texts), grid.columns
    lines = {
        row: {model: wrapped(text.pieces, ACROSS) for model, text in by_model.items()}
        for row, by_model in grid.texts.items()
    }
    # The name of a text is written vertically beside the row.
    tall = {row: max(1 + len(row) // 3, *map(len, lines[row].values())) for row in rows}
    wide, high = (ACROSS + 3) * WIDE * len(columns), HIGH * sum(tall.values())
    beside, above, between = 0.5, 3.3 * HIGH, 1.2 * HIGH  # margins: left, top, between texts
    figure = canvas.figure(above + high + between * len(rows))
    figure.set_figwidth(beside + wide)
    figure.set_layout_engine("none")  # a layout engine would resize the axes
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
    """Wrap a text into lines of at most `across` characters, without splitting pieces.

    Args:
        pieces: The pieces of the text, each with the index of its expert.
        across: The maximum number of characters per line, unless a single piece is longer.

    Returns:
        The pieces of each line, each with the index of its expert.
    """
    lines: list[list[tuple[str, int]]] = [[]]
    for piece, expert in pieces:
        for text in piece.replace("\t", " ").replace("\n", "↵\n").splitlines(keepends=True):
            word = text.rstrip("\n")
            if lines[-1] and sum(len(part) for part, _ in lines[-1]) + len(word) > across:
                lines.append([])
            lines[-1].append((word, expert))
            if text.endswith("\n"):
                lines.append([])
    return lines

"""How figures look: light and dark, wide and narrow, and one colour per method everywhere.

Colours are those of Okabe and Ito, which people with any kind of colour vision tell apart, made
darker or lighter where they would be faint on the page; every method has a marker of its own too.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.tables import Table


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    name: str
    paper: str
    ink: str
    quiet: str
    lines: str
    colours: tuple[str, ...]
    """The first is for what was not trained, the second for what is not private."""
    depths: tuple[float, float]
    """The part of viridis that is seen well on this paper, for layers from first to last."""


LIGHT = Theme(
    "light", "#ffffff", "#1c2026", "#5b6470", "#dde1e6",
    ("#7a828c", "#1c2026", "#0072b2", "#c44e00", "#00805a", "#b2478a", "#a87400", "#6b4fa0",
     "#2f97cf"),
    (0.0, 0.78),
)  # fmt: skip
DARK = Theme(
    "dark", "#15181d", "#e8ebef", "#a3acb8", "#343b45",
    ("#9aa3ae", "#e8ebef", "#4ba3e3", "#ff8a4c", "#2cc295", "#e897c8", "#f0b93a", "#b7a1ee",
     "#a5dcff"),
    (0.22, 1.0),
)  # fmt: skip
THEMES = (LIGHT, DARK)

FIXED = {
    "pretrained": 0,
    "centralized": 1,
    "local": 2,
    "fedavg": 3,
    "comigs-1g1s": 4,
    "comigs-2g": 5,
    "comigs-2s": 6,
}
"""Colours of the methods that most reports show; others take what is left."""
MARKERS = "osD^vPXdp<>*hH8"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What an SVG file may not contain: matplotlib writes names into comments."""


@dataclass(frozen=True)
class Look:
    """How one label is drawn in every figure: a place among the colours, a marker, a dash."""

    colour: int
    marker: str
    dash: Any


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """A look for every label, no two the same while markers last."""
    used = {FIXED[label] for label in labels if label in FIXED}
    free = [n for n in range(2, len(LIGHT.colours)) if n not in used]
    free.sort(key=lambda n: n in FIXED.values())  # those of methods that are not here come last
    found: dict[str, Look] = {}
    others = 0
    for number, label in enumerate(labels):
        places = free or list(range(2, len(LIGHT.colours)))
        dash = 0
        if (colour := FIXED.get(label)) is None:
            colour = places[others % len(places)]
            dash = others // len(places) + (not free)
            others += 1
        found[label] = Look(colour, MARKERS[number % len(MARKERS)], DASHES[dash % len(DASHES)])
    return found


@dataclass(frozen=True)
class Canvas:
    """What a figure is drawn for: a theme, and a wide page or a phone."""

    theme: Theme
    narrow: bool = False

    @property
    def width(self) -> float:
        """Inches."""
        return 4.3 if self.narrow else 10.0

    def colour(self, look: Look) -> str:
        """Of a method."""
        return self.theme.colours[look.colour]

    def figure(self, height: float) -> Figure:
        """An empty figure of the page's width; height in inches."""
        return Figure(figsize=(self.width, height), layout="constrained")

    def panels(
        self,
        count: int,
        height: float,
        columns: tuple[int, int] = (2, 4),
        x: str = "",
        y: str = "",
        **kwargs: Any,
    ) -> tuple[Figure, list[Axes]]:
        """So many small panels; height in inches of one row.

        columns: panels side by side, at most, on a phone and on a wide page. x and y name the axes,
        below the lowest panels and left of the first ones.
        """
        across = min(count, columns[not self.narrow])
        rows = ceil(count / across)
        figure = self.figure(rows * height + 0.5)
        axes = list(figure.subplots(rows, across, squeeze=False, **kwargs).flat)
        for spare in axes[count:]:
            spare.remove()
        for n, axis in enumerate(axes[:count]):
            if n % across == 0:
                axis.set_ylabel(y)
            if n + across >= count:
                axis.set_xlabel(x)
                axis.tick_params(labelbottom=True)
            if x == "round":
                axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        return figure, axes[:count]

    def legend(self, figure: Figure, axes: Axes) -> None:
        """Put one legend below all panels, with the entries of one of them."""
        handles, names = axes.get_legend_handles_labels()
        columns = max(1, int(self.width * 11 / (max(map(len, names)) + 7)))
        rows = ceil(len(names) / columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * rows)
        where: Any = "outside lower center"
        figure.legend(handles, names, loc=where, ncols=min(columns, len(names)))

    def series(self, place: int) -> dict[str, Any]:
        """Return the colour, marker and dash of one of several clients."""
        colours = self.theme.colours[2:]
        return {
            "color": colours[place % len(colours)],
            "marker": MARKERS[place % len(MARKERS)],
            "linestyle": DASHES[place // len(colours) % len(DASHES)],
        }

    def depths(self, layers: int) -> ListedColormap:
        """Return a colour for each layer, by how deep it is."""
        return ListedColormap(colormaps["viridis"](np.linspace(*self.theme.depths, layers)))

    def heat(self) -> Colormap:
        """From paper to full colour, for shares and scores: light is little on any paper."""
        light = self.theme is LIGHT
        name, low, high = ("Blues", 0.0, 0.85) if light else ("viridis", 0.12, 0.95)
        return ListedColormap(colormaps[name](np.linspace(low, high, 256)))

    def rc(self) -> Any:
        """Settings of matplotlib."""
        theme = self.theme
        return {
            "font.family": ["DejaVu Sans"],
            "font.size": 9.5,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.labelsize": 9.5,
            **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8.5),
            "legend.fontsize": 9,
            **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
            **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
            "grid.color": theme.lines,
            "grid.linewidth": 0.7,
            **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), theme.quiet),
            **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color"), theme.ink),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor"), theme.paper),
            "savefig.facecolor": theme.paper,
            "lines.linewidth": 1.8,
            "lines.markersize": 4.5,
            "lines.markeredgewidth": 0,
            "text.parse_math": False,  # names may contain dollar signs
            "svg.fonttype": "path",  # a picture in a page sees no fonts but the viewer's
            "svg.hashsalt": "coterie",  # the same figure is the same file
        }


@dataclass(frozen=True, eq=False)
class Picture:
    """One figure of a report, drawn anew for every theme and width."""

    name: str
    """Of its files."""
    title: str
    caption: str
    alt: str
    """What it shows, for those who do not see it."""
    draw: Callable[[Canvas], Figure]
    table: Table | None = None

    def render(self, canvas: Canvas, kind: str) -> bytes:
        """As an "svg" or "png" file."""
        out = io.BytesIO()
        with matplotlib.rc_context(canvas.rc()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # drawn as a box
            figure = self.draw(canvas)
            if kind == "svg":
                figure.savefig(out, format=kind, metadata={"Date": None})
                svg = out.getvalue().decode()
                return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", svg).encode()
            figure.savefig(out, format=kind, dpi=144)
        return out.getvalue()


@dataclass(frozen=True)
class LeftOut:
    """A figure that the runs hold nothing for."""

    title: str
    why: str


def number(value: float) -> str:
    """A figure for a table or a label: four digits or so, never in powers of ten."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

"""Themes, sizes and colours of figures. A method has the same colour in all figures of a report.

The colours are derived from those of Okabe and Ito, which are distinguishable with every kind of
colour vision. They are darkened or lightened for contrast with the page. Methods also differ in
their markers.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """The colours of a light or a dark page."""

    name: str
    paper: str
    ink: str
    quiet: str
    lines: str
    colours: tuple[str, ...]
    """The colours of methods. The first two are for untrained models and for pooled training."""
    depths: tuple[float, float]
    """The start and the end of the range of the colour map viridis that is used for layers.

    All colours in this range contrast with the background.
    """


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

FREQUENT = ("pretrained", "centralized", "local", "fedavg", "comigs-1g1s", "comigs-2g", "comigs-2s")
FIXED = {label: colour for colour, label in enumerate(FREQUENT)}
"""Indices in `Theme.colours` for frequent methods. Other methods get other colours."""
MARKERS = "osD^vPXdp<>*hH8"
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))


UNPRINTABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that are invalid in an SVG file.

They may occur in the names of clients and labels, which matplotlib writes as comments.
"""
SMALLEST_SEED = "From the run with the smallest seed."
"""The last sentence of the caption of a figure that does not average over seeds."""


@dataclass(frozen=True)
class Look:
    """The colour, marker and dash pattern with which all figures draw a label or a client.

    A label is a method with its settings. The colour is an index in `Theme.colours`.
    """

    colour: int
    marker: str
    dash: Any


def looks(labels: Sequence[str]) -> dict[str, Look]:
    """Assign a look to every label.

    A label names either a client, or a method with its settings. Looks can repeat only if there are
    more labels than markers.
    """
    used = {FIXED[label] for label in labels if label in FIXED}
    free = [n for n in range(2, len(LIGHT.colours)) if n not in used]
    free.sort(key=lambda n: n in FIXED.values())  # colours of absent FIXED methods come last
    assigned: dict[str, Look] = {}
    others = 0
    for number, label in enumerate(labels):
        colours = free or list(range(2, len(LIGHT.colours)))
        dash = 0
        if (colour := FIXED.get(label)) is None:
            colour = colours[others % len(colours)]
            dash = others // len(colours) + (not free)
            others += 1
        assigned[label] = Look(colour, MARKERS[number % len(MARKERS)], DASHES[dash % len(DASHES)])
    return assigned


@dataclass(frozen=True)
class Canvas:
    """The theme and the width for which a figure is drawn.

    A narrow canvas has the width of a phone. Any other canvas has the width of a wide page.
    """

    theme: Theme
    narrow: bool = False

    @property
    def width(self) -> float:
        """The width of a figure in inches."""
        return 4.3 if self.narrow else 10.0

    def colour(self, look: Look) -> str:
        """Return the theme's colour for a look, as a hexadecimal code such as "#0072b2"."""
        return self.theme.colours[look.colour]

    def figure(self, height: float) -> Figure:
        """Create an empty figure with the width of the page.

        Args:
            height: The height in inches.
        """
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
        """Create a figure with a grid of panels.

        Args:
            count: The number of panels.
            height: The height of a row of panels in inches.
            columns: The maximum number of panels per row, on a phone and on a wide page.
            x: The label of the x axes, below the lowest panels.
            y: The label of the y axes, left of the leftmost panels.
            kwargs: Further arguments of `Figure.subplots`.
        """
        across = min(count, columns[not self.narrow])
        rows = ceil(count / across)
        figure = self.figure(rows * height + 0.5)
        axes = list(figure.subplots(rows, across, squeeze=False, **kwargs).flat)
        for unused in axes[count:]:
            unused.remove()
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
        """Place one legend below all panels, with the entries of `axes`."""
        handles, names = axes.get_legend_handles_labels()
        columns = max(1, int(self.width * 11 / (max(map(len, names)) + 7)))
        figure.set_figheight(figure.get_figheight() + 0.2 * ceil(len(names) / columns))
        position: Any = "outside lower center"
        figure.legend(handles, names, loc=position, ncols=min(columns, len(names)))

    def series(self, number: int) -> dict[str, Any]:
        """Return matplotlib's arguments for the colour, marker and dash pattern of a client.

        Args:
            number: The position of the client among all clients, counted from 0.
        """
        colours = self.theme.colours[2:]
        return {
            "color": colours[number % len(colours)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[number // len(colours) % len(DASHES)],
        }

    def depths(self, layers: int) -> ListedColormap:
        """Return a colour map with one colour for each layer, from the first layer to the last."""
        return ListedColormap(colormaps["viridis"](np.linspace(*self.theme.depths, layers)))

    def heat(self) -> Colormap:
        """Return the colour map of heat maps; low values are close to the background colour."""
        name, low, high = ("Blues", 0.0, 0.85) if self.theme is LIGHT else ("viridis", 0.12, 0.95)
        return ListedColormap(colormaps[name](np.linspace(low, high, 256)))

    def rc(self) -> Any:
        """Return matplotlib's rcParams for this theme."""
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
            "svg.fonttype": "path",  # an image in a page cannot embed fonts
            "svg.hashsalt": "coterie",  # makes files reproducible
        }


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure of a report, which is drawn separately for every theme and width."""

    name: str
    """The figure's name, from which the names of its files are formed."""
    title: str
    caption: str
    alt: str
    """The alternative text, for screen readers."""
    draw: Callable[[Canvas], Figure]
    table: Table | None = None
    sentences: Sequence[str] = field(default=(), kw_only=True)
    """The items of a list between the caption and the figure."""

    def render(self, canvas: Canvas, kind: str) -> bytes:
        """Render the figure as an "svg" or "png" file."""
        out = io.BytesIO()
        with matplotlib.rc_context(canvas.rc()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # matplotlib draws a box instead
            figure = self.draw(canvas)
            if kind == "svg":
                figure.savefig(out, format=kind, metadata={"Date": None})
                svg = out.getvalue().decode()
                return UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", svg).encode()
            figure.savefig(out, format=kind, dpi=144)
        return out.getvalue()


@dataclass(frozen=True)
class LeftOut:
    """A figure that cannot be drawn from the runs: its title, and why it cannot be drawn."""

    title: str
    why: str


def number(value: float) -> str:
    """Format a number with about four digits and without an exponent, for a table or a label."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

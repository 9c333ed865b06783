"""What several figures have in common: lines with bands, logarithmic axes, heat maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, LogLocator, MaxNLocator, NullLocator

from coterie.analysis.frame import Column, Frame
from coterie.evaluation.metrics import Metric
from coterie.report.style import Canvas, Look, number

SPREAD = "Bands and bars: one standard deviation over seeds."


def scale_of(metric: Metric) -> str:
    """For a caption."""
    return "" if metric.share else "; logarithmic scale"


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis that holds its data already with a few round numbers."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(AutoLocator() if high < 10 * low else LogLocator(subs=(1, 3)))
    axis.set_major_formatter(lambda value, _: number(value) if value >= 1000 else f"{value:.6g}")
    axis.set_minor_locator(NullLocator())


def entry(label: str) -> str:
    """Return a label for a legend, from which matplotlib leaves out those that begin with `_`."""
    return f"\N{WORD JOINER}{label}" if label.startswith("_") else label


def line(
    canvas: Canvas, axis: Axes, x: Any, mean: Column, spread: Column, look: Look, label: str
) -> None:
    """A line with a marker at every point and a band of one standard deviation."""
    colour = canvas.colour(look)
    axis.plot(x, mean, color=colour, marker=look.marker, linestyle=look.dash, label=entry(label))
    axis.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def over_rounds(
    canvas: Canvas,
    figures: Frame,
    labels: Sequence[str],
    panels: Sequence[str],
    look: Mapping[str, Look],
    metric: Metric,
    y: str,
) -> Figure:
    """A panel for the mean and each client, a line for each label.

    figures: by label and round; columns by panel, with `mean` and `std` over seeds of each.
    """
    across = 2 if canvas.narrow else 3
    figure, axes = canvas.panels(len(panels), 2.1, across, "round", y)
    for axis, panel in zip(axes, panels, strict=True):
        for label in labels:
            # Of one seed there is no deviation.
            found = figures[panel].loc[label].dropna(subset=["mean"]).fillna(0.0)
            line(canvas, axis, found.index, found["mean"], found["std"], look[label], label)
        axis.set_title(panel)
        if not metric.share:
            axis.set_yscale("log")
            plain_log(axis.yaxis)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    canvas.legend(figure, axes[0], max(map(len, labels)))
    return figure


def annotate(axis: Axes, shades: np.ndarray, canvas: Canvas, words: np.ndarray) -> None:
    """Write words into a heat map's cells, dark on light or light on dark; shades: 0 to 1."""
    colours = canvas.heat()
    for (row, column), shade in np.ndenumerate(shades):
        if np.isnan(shade):
            continue
        red, green, blue, _ = colours(float(shade))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
        ink = "#101318" if bright else "#ffffff"
        word = str(words[row, column])
        axis.text(column, row, word, color=ink, ha="center", va="center", fontsize=8)


def heat_map(canvas: Canvas, figure: Figure, axis: Axes, cells: Frame, label: str) -> None:
    """A frame of figures in the unit that is shown, with a colour bar; rows and columns as named.

    The names of the frame's two axes are those of the figure's.
    """
    values = cells.to_numpy(dtype=float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    image = axis.imshow(values, cmap=canvas.heat(), vmin=low, vmax=high, aspect="auto")
    axis.set_xticks(range(len(cells.columns)), map(str, cells.columns))
    axis.set_yticks(range(len(cells.index)), map(str, cells.index))
    axis.set_xlabel(cells.columns.name or "")
    axis.set_ylabel(cells.index.name or "")
    axis.grid(False)
    axis.spines[:].set_visible(False)
    shades = (values - low) / max(high - low, 1e-9)
    annotate(axis, shades, canvas, np.vectorize("{:.2f}".format)(values))
    figure.colorbar(image, ax=axis, label=label)

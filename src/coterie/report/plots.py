"""Plotting functions that several figures share: lines with bands, logarithmic axes, heat maps."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import AutoLocator, LogLocator, NullLocator

from coterie.analysis.frame import Frame
from coterie.evaluation.metrics import Metric
from coterie.report.style import LIGHT, Canvas, Look, number

SPREAD = "Bands and bars: ±1 standard deviation over seeds."


def scale_of(metric: Metric) -> str:
    """Return the part of a caption that describes the scale of a metric.

    The part is an empty string if the scale is not logarithmic.
    """
    return "; logarithmic scale" if metric.logarithmic else ""


def scale(axes: Axes, way: str, metric: Metric) -> None:
    """Make an axis logarithmic if the metric is plotted logarithmically.

    Call this function after plotting.

    Args:
        axes: The axes.
        way: The axis that shows the metric, "x" or "y".
        metric: The metric.
    """
    if metric.logarithmic:
        axes.set(**{f"{way}scale": "log"})
        plain_log(axes.xaxis if way == "x" else axes.yaxis)


def plain_log(axis: Axis) -> None:
    """Label a logarithmic axis with a few round numbers. Call this function after plotting."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(AutoLocator() if high < 10 * low else LogLocator(subs=(1, 3)))
    axis.set_major_formatter(lambda value, _: number(value) if value >= 1000 else f"{value:.6g}")
    axis.set_minor_locator(NullLocator())


def evenly(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spaced indices from 0 to `count` - 1, including both ends."""
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, most))})


def entry(label: str) -> str:
    """Format a label for a legend.

    Matplotlib omits labels that begin with `_` from legends. Such a label therefore gets an
    invisible first character.
    """
    return f"\N{WORD JOINER}{label}" if label.startswith("_") else label


def line(canvas: Canvas, axis: Axes, figures: Frame, look: Look, label: str) -> None:
    """Draw means as a line with a band of plus or minus one standard deviation.

    Args:
        canvas: The canvas to draw on.
        axis: The axes to draw in.
        figures: A frame of numbers, whose index contains the x values. Its column `mean` contains
            the y values of the line. Its column `std` contains the standard deviations.
        look: The look of the line.
        label: The label of the line in the legend.
    """
    colour, x, mean = canvas.colour(look), figures.index, figures["mean"]
    spread = figures["std"].fillna(0.0)  # NaN for a single seed
    axis.plot(x, mean, color=colour, marker=look.marker, linestyle=look.dash, label=entry(label))
    axis.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)


def lines_by_client(canvas: Canvas, axis: Axes, figures: Frame) -> None:
    """Draw one line per client.

    Args:
        canvas: The canvas to draw on.
        axis: The axes to draw in.
        figures: A frame of numbers, whose index contains the x values. Each column has a client's
            name, and contains the y values of this client's line.
    """
    for position, client in enumerate(figures):
        axis.plot(figures[client], **canvas.series(position), markersize=3.5, label=entry(client))


def over_rounds(
    canvas: Canvas,
    figures: Frame,
    labels: Sequence[str],
    panels: Sequence[str],
    look: Mapping[str, Look],
    metric: Metric,
    y: str,
) -> Figure:
    """Draw scores over rounds in several panels, with a line per label in each panel.

    Args:
        canvas: The canvas to draw on.
        figures: A frame of numbers with a row per label and round. For each panel, the frame has
            two columns: the `mean` and the `std` of the scores over seeds.
        labels: The labels (methods and settings) to draw.
        panels: The names of the panels to draw.
        look: The look of each label.
        metric: The metric of the scores.
        y: The name of the y axis.
    """
    figure, axes = canvas.panels(len(panels), 2.1, (2, 3), "round", y)
    for axis, panel in zip(axes, panels, strict=True):
        for label in labels:
            scores = figures[panel].loc[label].dropna(subset=["mean"])
            line(canvas, axis, scores, look[label], label)
        axis.set_title(panel)
        scale(axis, "y", metric)
    canvas.legend(figure, axes[0])
    return figure


def cells(
    canvas: Canvas, axis: Axes, figures: Frame, low: float, high: float, form: str = ""
) -> AxesImage:
    """Draw a frame of numbers as coloured cells, labelled with the frame's rows and columns.

    Args:
        canvas: The canvas to draw on.
        axis: The axes to draw in.
        figures: The frame of numbers. Each number becomes one cell.
        low: The value that has the first colour of the colour map.
        high: The value that has the last colour of the colour map.
        form: The format specification, such as ".2f", of the values that are written into the
            cells. With an empty string, no values are written.
    """
    image = axis.imshow(figures, cmap=canvas.heat(), vmin=low, vmax=high, aspect="auto")
    axis.set_xticks(range(len(figures.columns)), map(str, figures.columns))
    axis.set_yticks(range(len(figures.index)), map(str, figures.index))
    axis.set_xlabel(figures.columns.name or "")
    axis.set_ylabel(figures.index.name or "")
    axis.grid(False)
    axis.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(figures.to_numpy(dtype=float)):
        if form and not np.isnan(value):
            bright = np.dot(image.to_rgba(value)[:3], (0.299, 0.587, 0.114)) > 0.55
            ink = LIGHT.ink if bright else LIGHT.paper
            text = format(value, form)
            axis.text(column, row, text, color=ink, ha="center", va="center", fontsize=8)
    return image


def heat_map(canvas: Canvas, figure: Figure, axis: Axes, figures: Frame, label: str) -> None:
    """Draw a frame of numbers as a heat map with a colour bar.

    Args:
        canvas: The canvas to draw on.
        figure: The matplotlib figure that contains `axis`.
        axis: The axes to draw in. They are labelled with the names of the frame's index and
            columns.
        figures: The frame of numbers. Each number becomes one cell.
        label: The label of the colour bar.
    """
    values = figures.to_numpy(dtype=float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    image = cells(canvas, axis, figures, low, max(high, low + 1e-9), ".2f")
    figure.colorbar(image, ax=axis, label=label)


def of_pairs(
    canvas: Canvas, matrices: Mapping[str, Frame], low: float, high: float, label: str
) -> Figure:
    """Draw each matrix in a panel, and add one colour bar for all panels.

    Args:
        canvas: The canvas to draw on.
        matrices: A mapping from the title of each panel to the panel's matrix, which has a row and
            a column per client.
        low: The value that has the first colour of the colour map.
        high: The value that has the last colour of the colour map.
        label: The label of the colour bar.
    """
    clients = [str(client) for client in next(iter(matrices.values())).columns]
    names = 0.075 * max(map(len, clients))  # inches
    smallest = 0.13 * len(clients)  # inches; the clients' names would overlap in a smaller panel
    longest = max(3.2, smallest) if len(matrices) > 1 else 0.45 * len(clients) + 0.4
    width = canvas.width - names - 1.0
    most = 4 if not canvas.narrow else 1 if names > 0.6 else 2
    across = max(1, min(most, int(width / smallest)))
    side = min(width / min(len(matrices), across), longest)
    figure, axes = canvas.panels(
        len(matrices), side + 0.25, (across, across), sharex=True, sharey=True
    )
    figure.set_figheight(figure.get_figheight() + names - 0.4)
    form = (".2f" if high - low > 0.05 else ".4f") if side / len(clients) > 0.33 else ""
    for axis, (title, weights) in zip(axes, matrices.items(), strict=True):
        cells(canvas, axis, weights, low, high, form)
        axis.set_aspect("equal")
        axis.set_title(title)
        axis.tick_params(axis="x", rotation=90)
    aspect = 6 * figure.get_figheight()  # a bar of constant width, for which `width` leaves space
    figure.colorbar(axes[0].images[0], ax=axes, label=label, shrink=0.8, aspect=aspect)
    return figure

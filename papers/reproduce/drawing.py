"""Filled-in tables of papers as figures: dots, lines, a heat map, or curves over rounds.

`python -m reproduce.drawing` draws the pictures in papers/results, and writes its pages and the
list in its index, from the result files there.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.analysis.experiments import MEAN
from coterie.analysis.frame import Frame
from coterie.analysis.tables import Summary
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric, metric_named
from coterie.files import write_bytes, writing
from coterie.report.plots import SPREAD, heat_map, line, over_rounds, scale, scale_of
from coterie.report.style import LIGHT, Canvas, Picture, looks
from reproduce.figures import HOLLOW, compared, figures, kind_of
from reproduce.pages import IMAGES, page_name, read_result, write_pages

OURS, PAPER = 2, 3
"""Indices into a theme's colours."""


def pictures(summary: Summary, name: str = "scores") -> list[Picture]:
    """Return the figures of a table, of the kind that its file asks for; `figures` names them.

    Raises:
        CoterieError: The table shows no scores, or none of its rows has been run.
    """
    title, kind, columns = summary["table"], kind_of(summary), summary["columns"]
    if kind is None:
        raise CoterieError(f"{title!r} shows no scores, so it has no figure.")
    if not any(row["seeds"] for column in columns for row in column["rows"]):
        raise CoterieError(f"No row of {title!r} has been run yet.")
    named = figures(summary, name)
    if kind == "curves":
        return [
            Picture(name, f"{title}: {column['name']}", caption, alt, draw)
            for column, (name, alt) in zip(columns, named.items(), strict=True)
            if any("rounds" in row for row in column["rows"])
            for caption, draw in [_curves(summary, column)]
        ]
    [(name, alt)] = named.items()
    caption, draw = {"dots": _dots, "lines": _lines, "heat map": _heat_maps}[kind](summary)
    return [Picture(name, title, caption, alt, draw)]


def write_pictures(summary: Summary, folder: Path) -> None:
    """Draw the figures of a table for its page in a folder of results."""
    if kind_of(summary) is None:
        return
    images = folder / IMAGES
    with writing(images):
        images.mkdir(parents=True, exist_ok=True)
    for picture in pictures(summary, page_name(summary)):
        write_bytes(images / f"{picture.name}.png", picture.render(Canvas(LIGHT), "png"))


Drawn = tuple[str, Callable[[Canvas], Figure]]
"""A caption, and the function that draws the figure."""


def _metric(column: Summary) -> Metric:
    return metric_named(column["metric"])


def _of_rows(column: Summary) -> Frame:
    """Return our mean and deviation and the paper's, by row of the table; NaN where unknown."""
    metric = _metric(column)
    values = {
        row["row"]: {
            "mean": metric.shown(row[metric.name]) if row["seeds"] else None,
            "std": metric.shown(row["std"]) if row["seeds"] > 1 else None,
            "paper": row["paper"],
            "paper_std": row.get("paper_std"),
        }
        for row in column["rows"]
    }
    return pd.DataFrame.from_dict(values, orient="index", dtype=float)


def _caption(summary: Summary, *more: str) -> str:
    metrics = dict.fromkeys(map(_metric, summary["columns"]))
    means = [
        f"Mean {summary['split']} {m.label} over clients{scale_of(m)}. {m.better}" for m in metrics
    ]
    beside = HOLLOW[kind_of(summary) or ""] if compared(summary) else ""
    return " ".join([*means, *more, *([f"{beside.capitalize()}."] if beside else [])])


def _dots(summary: Summary) -> Drawn:
    """Plot our mean and the paper's figure for each row, in a panel for each column.

    Our scale is below and the paper's is above: only the places of the rows can be compared.
    """
    columns = summary["columns"]
    rows = [row["row"] for row in columns[0]["rows"]]
    labels = [_metric(column).label for column in columns]
    paper = compared(summary)

    def draw(canvas: Canvas) -> Figure:
        across = (1, ceil(len(columns) / ceil(len(columns) / 4)))
        x = labels[0] if len(set(labels)) == 1 else ""
        height = 0.22 * len(rows) + (1.05 if paper else 0.75)
        figure, axes = canvas.panels(len(columns), height, across, x, sharey=True)
        for axis, column, label in zip(axes, columns, labels, strict=True):
            frame = _of_rows(column)
            axis.set_title(column["name"])
            axis.set_yticks(range(len(rows)), rows)
            if not x:
                axis.set_xlabel(label)
            shift, metric = 0.14 * paper, _metric(column)
            ours = frame[["mean", "std"]].to_numpy()
            _row_of_dots(axis, ours, "o", canvas.theme.colours[OURS], -shift, metric)
            if paper:
                published = frame[["paper", "paper_std"]].to_numpy()
                colour = canvas.theme.colours[PAPER]
                above = axis.twiny()
                above.grid(False)
                _row_of_dots(above, published, "D", colour, shift, metric)
                axis.plot([], [], "D", color=colour, mfc="none", mew=1.4, label="the paper's")
            axis.margins(y=0.6 / len(rows))
        axes[0].invert_yaxis()
        if paper:
            canvas.legend(figure, axes[0])
        return figure

    return _caption(summary, SPREAD), draw


def _row_of_dots(
    axis: Axes, figures: np.ndarray, marker: str, colour: str, shift: float, metric: Metric
) -> None:
    """Plot figures, (rows, 2): means and deviations, with a scale in the colour of the dots."""
    places = np.arange(len(figures)) + shift
    axis.errorbar(
        figures[:, 0], places, xerr=figures[:, 1], fmt=marker, color=colour, label="ours",
        markerfacecolor=colour if marker == "o" else "none", elinewidth=1.4, capsize=2,
        markersize=6, markeredgewidth=1.4,
    )  # fmt: skip
    axis.margins(x=0.08)
    axis.tick_params(axis="x", colors=colour)
    if not np.isnan(figures[:, 0]).all():
        scale(axis, "x", metric)


def _lines(summary: Summary) -> Drawn:
    """Plot a line for each row over the columns, in their order."""
    columns = summary["columns"]
    names, metric = [column["name"] for column in columns], _metric(columns[0])
    frames = [_of_rows(column) for column in columns]
    rows: Sequence[str] = list(frames[0].index)
    look = looks(rows)

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(4.0)
        axis = figure.subplots()
        places = np.arange(len(names))
        hollow: dict[str, Any] = {
            "linestyle": (0, (1, 2)),
            "linewidth": 1,
            "markerfacecolor": canvas.theme.paper,
            "markeredgewidth": 1.2,
        }
        for row in rows:
            values: Frame = pd.DataFrame([frame.loc[row] for frame in frames], places)
            if values["mean"].notna().any():
                line(canvas, axis, values, look[row], row)
            marks = {"color": canvas.colour(look[row]), "marker": look[row].marker}
            axis.plot(places, values["paper"], **marks, **hollow)
        if compared(summary):
            axis.plot([], [], color=canvas.theme.quiet, marker="o", label="the paper's", **hollow)
        axis.set_xticks(places, names)
        axis.set_xlabel(summary["figure"]["x"])
        axis.set_ylabel(f"{summary['split']} {metric.label}")
        scale(axis, "y", metric)
        canvas.legend(figure, axis)
        return figure

    return _caption(summary, SPREAD), draw


def _heat_maps(summary: Summary) -> Drawn:
    """Plot a heat map of rows by columns, and another of the paper's figures if there are any."""
    columns, figure = summary["columns"], summary["figure"]
    frames = {column["name"]: _of_rows(column) for column in columns}
    shown = {"ours": "mean"} | ({"the paper's": "paper"} if compared(summary) else {})
    cells: Mapping[str, Frame] = {
        title: pd.DataFrame({name: frame[key] for name, frame in frames.items()}).rename_axis(
            index=figure["y"], columns=figure["x"]
        )
        for title, key in shown.items()
    }

    def draw(canvas: Canvas) -> Figure:
        height = 0.42 * len(columns[0]["rows"]) + 0.9
        drawn, axes = canvas.panels(len(cells), height, (1, len(cells)))
        for axis, (title, values) in zip(axes, cells.items(), strict=True):
            heat_map(canvas, drawn, axis, values, f"mean {_metric(columns[0]).label}")
            if len(cells) > 1:
                axis.set_title(title)
        return drawn

    return _caption(summary), draw


def _curves(summary: Summary, column: Summary) -> Drawn:
    """Plot the scores of a column over rounds, in a panel for the mean and one for each client."""
    metric = _metric(column)
    kept = {row["row"]: row["rounds"] for row in column["rows"] if "rounds" in row}
    frames = {}
    for row, rounds in kept.items():
        index = pd.Index(rounds["round"], name="round")
        both = {key: pd.DataFrame(rounds[key], index, dtype=float) for key in ("mean", "std")}
        frames[row] = pd.concat(both, axis=1).map(metric.shown).swaplevel(axis=1)
    every: Frame = pd.concat(frames, names=["label", "round"])
    clients: Sequence[str] = sorted(set(every.columns.get_level_values(0)) - {MEAN})
    look, y = looks([row["row"] for row in column["rows"]]), f"{summary['split']} {metric.label}"
    scores = f"{y.capitalize()} of each client's model after every evaluated round"
    return (
        f"{scores}{scale_of(metric)}. {SPREAD} {metric.better}",
        lambda canvas: over_rounds(canvas, every, list(kept), [MEAN, *clients], look, metric, y),
    )


if __name__ == "__main__":
    folder = Path(__file__).parents[1] / "results"
    for path in sorted(folder.glob("*.json")):
        write_pictures(read_result(path), folder)
    write_pages(folder)

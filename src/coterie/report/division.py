"""Figure of the data distribution: records by class label or tokens by split, for each client."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment
from coterie.analysis.tables import frame_table, listed
from coterie.report.figures import ReportFigure
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture, number

HEIGHT = 0.42
"""The height of a client's row in inches; the largest bubble nearly fills the row."""


class Division(ReportFigure):
    """A bubble chart of how much data each client has.

    If the run recorded class labels, each bubble shows the number of records of one client and one
    class label. Otherwise, each bubble shows the number of tokens of one client and one split.
    """

    name = "division"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        entries = next((run.clients for run in experiment.all if not run.config["pooled"]), {})
        for key, unit in (("labels", "records"), ("tokens", "tokens")):
            counts = {client: entry[key] for client, entry in entries.items() if entry.get(key)}
            if counts:
                yield _bubbles(counts, key, unit)
                return
        yield LeftOut("Data distribution", "no run recorded how much data each client has")


def _bubbles(counts: Mapping[str, Mapping[str, int]], key: str, unit: str) -> Picture:
    frame = pd.DataFrame.from_dict(dict(counts), orient="index").fillna(0).astype(int)
    if key == "labels":
        frame = frame.sort_index(axis=1)
    clients, columns, values = list(frame.index), list(frame), frame.to_numpy()

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(HEIGHT * len(clients) + 1.2)
        axis = figure.subplots()
        widest = min(HEIGHT, 0.8 * canvas.width / len(columns)) * 72 * 0.9  # points
        y, x = values.nonzero()
        areas = widest**2 * values[y, x] / values.max()
        axis.scatter(x, y, s=areas, color=canvas.theme.colours[2], alpha=0.8, linewidths=0)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(len(clients) - 0.5, -0.5)
        steep = len(columns) * max(map(len, columns)) > canvas.width * 9
        turned: Any = {"rotation": 60, "ha": "right"} if steep else {}
        axis.set_xticks(range(len(columns)), columns, **turned)
        axis.set_yticks(range(len(clients)), clients)
        axis.set_xlabel(f"bubble area: number of {unit} (largest: {number(values.max())})")
        return figure

    singular = "label" if key == "labels" else "split"
    return Picture(
        "division",
        f"Data distribution: {unit} by client and {singular}",
        f"Bubble area is proportional to the number of {unit}."
        + (f" {SMALLEST_SEED}" if key == "labels" else ""),
        f"Bubble chart of {unit} for {listed(clients)} by {singular}; the table lists the numbers.",
        draw,
        frame_table(f"{unit.capitalize()} by {singular}", "client", frame, ","),
    )

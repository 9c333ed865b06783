"""How text is divided among clients: labels where the run has any, else the size of each split."""

from collections.abc import Iterator, Mapping

import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment
from coterie.analysis.tables import frame_table, listed
from coterie.report.style import Canvas, LeftOut, Picture, number

HEIGHT = 0.42
"""Inches of a client's row; the largest bubble nearly fills it."""


def division(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """One bubble per client and label (area: records), or per client and split (area: tokens)."""
    entries = next((run.clients for run in experiment.all if not run.config["pooled"]), {})
    for key, what in (("labels", "records"), ("tokens", "tokens")):
        counts = {client: entry[key] for client, entry in entries.items() if entry.get(key)}
        if counts:
            yield _bubbles(counts, key, what)
            return
    yield LeftOut("Data distribution", "no run recorded how much data each client has")


def _bubbles(counts: Mapping[str, Mapping[str, int]], key: str, what: str) -> Picture:
    found = pd.DataFrame.from_dict(dict(counts), orient="index").fillna(0).astype(int)
    if key == "labels":
        found = found.sort_index(axis=1)
    clients, columns, held = list(found.index), list(found), found.to_numpy()

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(HEIGHT * len(clients) + 1.2)
        axis = figure.subplots()
        widest = min(HEIGHT, 0.8 * canvas.width / len(columns)) * 72 * 0.9  # points
        y, x = held.nonzero()
        areas = widest**2 * held[y, x] / held.max()
        axis.scatter(x, y, s=areas, color=canvas.theme.colours[2], alpha=0.8, linewidths=0)
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(len(clients) - 0.5, -0.5)
        steep = len(columns) * max(map(len, columns)) > canvas.width * 9
        axis.set_xticks(
            range(len(columns)), columns, **({"rotation": 60, "ha": "right"} if steep else {})
        )
        axis.set_yticks(range(len(clients)), clients)
        axis.set_xlabel(f"area: {what}; the largest is {number(held.max())}")
        return figure

    singular = "label" if key == "labels" else "split"
    return Picture(
        "division",
        f"Data distribution: {what} by client and {singular}",
        f"Bubble area is proportional to the number of {what}."
        + (" From the run with the smallest seed." if key == "labels" else ""),
        f"Bubble chart of {what} for {listed(clients)} by {singular}; the table lists the numbers.",
        draw,
        frame_table(f"{what.capitalize()} by {singular}", "client", found, ","),
    )

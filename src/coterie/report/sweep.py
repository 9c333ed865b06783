"""How scores depend on when routers are trained, and for how long (CoMiGS, figure 7)."""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment
from coterie.analysis.frame import Frame
from coterie.analysis.tables import frame_table, mean
from coterie.files import path_part
from coterie.report.plots import heat_map
from coterie.report.style import Canvas, LeftOut, Picture, number


def sweep(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """A heat map per method whose finished runs differ in `router.every` or `router.steps`."""
    found, metric = [], experiment.metric
    for run in experiment.all:
        router = run.config["method"].get("router") or {}
        if run.result is not None and {"every", "steps"} <= router.keys():
            score = metric.shown(mean(run.result, metric.key))
            found.append((run.method, router["every"], router["steps"], score))
    runs = pd.DataFrame(found, columns=["method", "every", "steps", "score"])
    methods = runs.groupby("method", sort=False)
    means = {method: rows.pivot_table("score", "steps", "every") for method, rows in methods}
    swept = {method: cells for method, cells in means.items() if cells.size > 1}
    if not swept:
        why = "no finished runs of the same method differ in router.every or router.steps"
        yield LeftOut("Router schedule", why)
    for method, cells in swept.items():
        yield _heat_map(experiment, str(method), cells)


def _heat_map(experiment: Experiment, method: str, cells: Frame) -> Picture:
    """cells: mean scores, a row per `router.steps`, a column per `router.every`."""
    metric, (steps, every) = experiment.metric, cells.shape

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(0.45 * steps + 1.3)
        named = cells.rename_axis(
            index="router.steps: updates per phase",
            columns="router.every: steps between router phases",
        )
        heat_map(canvas, figure, figure.subplots(), named, f"mean {metric.label}")
        return figure

    return Picture(
        f"router-schedule-{path_part(method)}",
        f"Router schedule of {method}",
        f"Mean {experiment.split} {metric.label} over clients, seeds and all other "
        f"differences between the runs. {metric.better}",
        f"Heat map of {steps} by {every} router schedules; {metric.label} ranges from "
        f"{number(cells.min(axis=None))} to {number(cells.max(axis=None))}. The table lists all "
        "values.",
        draw,
        frame_table(f"Mean {metric.label}", "router.steps \\ router.every", cells, ".2f"),
    )

"""How scores depend on when routers are trained, and for how long (CoMiGS, figure 7)."""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from coterie.files import path_part
from coterie.report.experiments import Experiment
from coterie.report.style import Canvas, LeftOut, Picture, number
from coterie.report.trust import annotate
from coterie.results.tables import Table, mean

Cell = tuple[int, int]


def sweep(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """A heat map per method whose finished runs differ in `router_every` or `router_steps`."""
    cells: dict[str, dict[Cell, list[float]]] = {}
    metric = experiment.metric
    for run in experiment.all:
        settings = run.config["method"]
        if run.result is not None and {"router_every", "router_steps"} <= settings.keys():
            cell = settings["router_every"], settings["router_steps"]
            found = cells.setdefault(run.method, {}).setdefault(cell, [])
            found.append(metric.shown(mean(run.result, metric.key)))
    swept = {method: found for method, found in cells.items() if len(found) > 1}
    if not swept:
        why = "no finished runs of one method differ in router_every or router_steps"
        yield LeftOut("Router schedule", why)
    for method, found in swept.items():
        yield _heat_map(experiment, method, found)


def _heat_map(experiment: Experiment, method: str, found: dict[Cell, list[float]]) -> Picture:
    every, steps = (sorted({cell[n] for cell in found}) for n in (0, 1))
    values = np.full((len(steps), len(every)), np.nan)
    for (tau, s), scores in found.items():
        values[steps.index(s), every.index(tau)] = np.mean(scores)
    metric = experiment.metric
    low, high = float(np.nanmin(values)), float(np.nanmax(values))

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(0.45 * len(steps) + 1.3)
        axis = figure.subplots()
        scaled = (values - low) / max(high - low, 1e-9)
        image = axis.imshow(values, cmap=canvas.heat(), vmin=low, vmax=high, aspect="auto")
        axis.set_xticks(range(len(every)), map(str, every))
        axis.set_yticks(range(len(steps)), map(str, steps))
        axis.set_xlabel("router_every: steps between two router phases")
        axis.set_ylabel("router_steps")
        axis.grid(False)
        axis.spines[:].set_visible(False)
        annotate(axis, scaled, canvas, np.vectorize("{:.2f}".format)(values))
        figure.colorbar(image, ax=axis, label=f"mean {metric.label}")
        return figure

    rows = [
        [str(s), *("" if np.isnan(v) else f"{v:.2f}" for v in values[n])]
        for n, s in enumerate(steps)
    ]
    return Picture(
        f"router-schedule-{path_part(method)}",
        f"Router schedule of {method}",
        f"Mean {experiment.split} {metric.label} over clients, seeds and whatever else differs "
        f"between the runs. {metric.better}",
        f"A heat map of {len(steps)} by {len(every)} router schedules; {metric.label} goes from "
        f"{number(low)} to {number(high)}. The table has every cell.",
        draw,
        Table(f"Mean {metric.label}", ["router_steps \\ router_every", *map(str, every)], rows),
    )

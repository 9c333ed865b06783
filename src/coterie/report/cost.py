"""Figures of cost: traffic per round, and floating-point operations relative to FedAvg."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.flops import Cost, costs_by_label
from coterie.analysis.frame import Column, Frame
from coterie.analysis.tables import frame_table, listed
from coterie.errors import CoterieError
from coterie.messages.names import BYTES_DOWN, BYTES_UP
from coterie.report.figures import ReportFigure
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture, looks

WAYS = {BYTES_UP: "upload", BYTES_DOWN: "download"}
MEGA, GIGA = 1e6, 1e9


class Traffic(ReportFigure):
    """A figure that compares the traffic of all labels (method and settings).

    The figure shows the bytes that each client uploads and downloads per round.
    """

    name = "traffic"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        runs = {label: runs[0] for label, runs in experiment.drawn.items() if runs[0].rounds}
        if runs:
            yield _traffic(experiment, runs)
        else:
            yield LeftOut("Traffic", "no run has finished a round")


def _bytes(run: ReportedRun, way: str) -> Column:
    """Return the size in bytes of each client's upload or download in each round.

    Args:
        run: The run.
        way: The name of the metric: BYTES_UP for uploads, or BYTES_DOWN for downloads.

    Returns:
        A series, indexed by client and round.
    """
    rows = run.metrics[run.metrics["name"] == way].dropna(subset="client")
    # A download after the last upload serves evaluation only and does not count.
    turns = run.metrics["turn"][run.metrics["name"] == BYTES_UP]
    first = rows[rows["turn"].isin(turns)].groupby(["client", "round", "turn"])["value"].first()
    sizes = first.groupby(["client", "round"]).sum()
    return sizes if len(sizes) else pd.Series([0])


def _traffic(experiment: Experiment, runs: Mapping[str, ReportedRun]) -> Picture:
    styles = looks(list(experiment.runs))
    sizes_by_way: dict[str, Frame] = {}
    for way, title in WAYS.items():
        sizes = {n: _bytes(run, way).agg(["mean", "min", "max"]) for n, run in runs.items()}
        sizes_by_way[title] = pd.DataFrame(sizes).T

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            2, 0.24 * len(runs) + 0.6, (2, 2), "MB per client and round", sharex=True, sharey=True
        )
        for axis, (title, sizes) in zip(axes, sizes_by_way.items(), strict=True):
            means = sizes["mean"] / MEGA
            spans = (sizes[["min", "max"]] / MEGA).sub(means, axis=0).abs().T
            colours = [canvas.colour(styles[label]) for label in runs]
            error = {"ecolor": canvas.theme.ink, "elinewidth": 1.8}
            bars = axis.barh(
                range(len(runs)), means, 0.62, color=colours, xerr=spans, error_kw=error
            )
            axis.bar_label(bars, [f"{mean:.2f}" for mean in means], fontsize=8.5, padding=2)
            axis.set_title(title)
            axis.set_yticks(range(len(runs)), list(runs))
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.2)
        axes[0].invert_yaxis()
        return figure

    table = pd.concat([sizes[["mean", "max"]] for sizes in sizes_by_way.values()], axis=1)
    table.columns = [f"{way}, {column}" for way in sizes_by_way for column in ("mean", "maximum")]
    return Picture(
        "traffic",
        "Traffic per client and round",
        "Size of encoded messages, mean over clients and rounds (1 MB = 10^6 bytes). Dark lines "
        f"extend from the minimum to the maximum, where these differ. {SMALLEST_SEED}",
        f"Bar chart of upload and download sizes per client and round for {listed(runs)}; the "
        "table lists the values.",
        draw,
        frame_table("Bytes per client and round", "method", table, ",.0f"),
    )


class Operations(ReportFigure):
    """A figure that compares the operations of all labels (method and settings).

    The figure shows the floating-point operations per round. If FedAvg was run, the figure also
    shows the operations relative to FedAvg.
    """

    name = "operations"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        title = "Floating-point operations"
        try:
            results = costs_by_label(experiment)
        except CoterieError as error:
            yield LeftOut(title, str(error))
            return
        for label, result in results.items():
            if isinstance(result, str):
                yield LeftOut(f"{title} of {label}", result)
        costs = {label: cost for label, cost in results.items() if not isinstance(cost, str)}
        fedavg = [n for n, run in experiment.first if n in costs and run.method == "fedavg"]
        if costs:
            yield _operations(experiment, costs, fedavg[0] if fedavg else None)


def _operations(experiment: Experiment, costs: dict[str, Cost], fedavg: str | None) -> Picture:
    styles, unit = looks(list(experiment.runs)), "GFLOP per round, sum over clients"
    flops: Frame = pd.DataFrame.from_dict(costs, orient="index") / GIGA
    totals = flops.sum(axis=1)
    extra = [f"{100 * (flop / totals[fedavg] - 1):+.1f} %" for flop in totals] if fedavg else []
    # A method's first level is drawn in full colour, its other levels in paler colours.
    turns = list(zip_longest(*(cost.items() for cost in costs.values()), fillvalue=("", 0.0)))
    long = " Every sample is assumed to fill the window." if experiment.instructed else ""

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 0.27 * len(costs) + 0.6)
        left = np.zeros(len(costs))
        colours = [canvas.colour(styles[label]) for label in costs]
        for turn, levels in enumerate(turns):
            shown: Any = {"height": 0.62, "alpha": 0.5**turn}
            steps = [cost / GIGA for _, cost in levels]
            names = listed(dict.fromkeys(name for name, _ in levels if name))
            axis.barh(range(len(costs)), steps, left=left, color=colours, **shown)
            axis.barh(0, 0, color=canvas.theme.quiet, **shown, label=names)
            left += steps
        if fedavg:
            bars = axis.barh(range(len(costs)), left, color="none")
            axis.bar_label(bars, extra, fontsize=8.5, padding=2)
        axis.set_yticks(range(len(costs)), list(costs))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.14)
        axis.set_xlabel(unit)
        canvas.legend(figure, axis)
        return figure

    table = frame_table(unit, "method", flops.assign(total=totals), ",.1f")
    if fedavg:
        rows = [[*row, percentage] for row, percentage in zip(table.rows, extra, strict=True)]
        table = replace(table, columns=[*table.columns, "relative to fedavg"], rows=rows)
    return Picture(
        "flops",
        "Floating-point operations per round",
        "Operations of matrix multiplications in forward and backward passes, summed over all "
        "clients. A level is a group of parameters that are trained together, such as the routers. "
        "For each client and level, the operations of one training step of the level are counted, "
        "and multiplied by the mean number of steps in which the client trains this level in a "
        "round."
        f"{' Percentages are relative to FedAvg.' if fedavg else ''}{long}",
        f"Bar chart of operations per round by level for {listed(costs)}; the table lists the "
        "values.",
        draw,
        table,
    )

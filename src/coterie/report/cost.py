"""What learning together costs: bytes that travel, and operations beyond FedAvg's."""

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
from coterie.report.style import Canvas, LeftOut, Picture, looks

WAYS = {BYTES_UP: "upload", BYTES_DOWN: "download"}
MEGA, GIGA = 1e6, 1e9


def traffic(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Bytes per client and round, of each label."""
    begun = {label: runs[0] for label, runs in experiment.drawn.items() if runs[0].rounds}
    if begun:
        yield _traffic(experiment, begun)
    else:
        yield LeftOut("Traffic", "no run has finished a round")


def _bytes(run: ReportedRun, way: str) -> Column:
    """Bytes of every client and round: the first message of a round, as others serve evaluation."""
    first = run.by_client(way).groupby(["client", "round"]).first()
    return first[0] if len(first) else pd.Series([0])


def _traffic(experiment: Experiment, begun: Mapping[str, ReportedRun]) -> Picture:
    look = looks(list(experiment.runs))
    found: dict[str, Frame] = {
        title: pd.DataFrame(
            {label: _bytes(run, way).agg(["mean", "min", "max"]) for label, run in begun.items()}
        ).T
        for way, title in WAYS.items()
    }

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            2, 0.24 * len(begun) + 0.6, (2, 2), "MB per client and round", sharex=True, sharey=True
        )
        for axis, (title, sizes) in zip(axes, found.items(), strict=True):
            means = sizes["mean"] / MEGA
            spans = (sizes[["min", "max"]] / MEGA).sub(means, axis=0).abs().T
            colours = [canvas.colour(look[label]) for label in begun]
            error = {"ecolor": canvas.theme.ink, "elinewidth": 1.8}
            bars = axis.barh(
                range(len(begun)), means, 0.62, color=colours, xerr=spans, error_kw=error
            )
            axis.bar_label(bars, [f"{mean:.2f}" for mean in means], fontsize=8.5, padding=2)
            axis.set_title(title)
            axis.set_yticks(range(len(begun)), list(begun))
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.2)
        axes[0].invert_yaxis()
        return figure

    table = pd.concat([found[way][["mean", "max"]] for way in found], axis=1)
    table.columns = [f"{title}, {what}" for title in found for what in ("mean", "most")]
    return Picture(
        "traffic",
        "Traffic per client and round",
        "Bytes of encoded messages, mean over clients and rounds (1 MB = 10^6 bytes). Dark "
        "lines span the minimum to the maximum where they differ.",
        f"Bar chart of upload and download per client and round for {listed(begun)}.",
        draw,
        frame_table("Bytes per client and round", "method", table, ",.0f"),
    )


def operations(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Yield floating-point operations per round by label, relative to FedAvg if it was run."""
    title = "Floating-point operations"
    try:
        found = costs_by_label(experiment)
    except CoterieError as error:
        yield LeftOut(title, str(error))
        return
    yield from (LeftOut(f"{title} of {n}", why) for n, why in found.items() if isinstance(why, str))
    costs = {label: cost for label, cost in found.items() if not isinstance(cost, str)}
    fedavg = [n for n, run in experiment.first if n in costs and run.method == "fedavg"]
    if costs:
        yield _operations(experiment, costs, fedavg[0] if fedavg else None)


def _operations(experiment: Experiment, costs: dict[str, Cost], fedavg: str | None) -> Picture:
    look, what = looks(list(experiment.runs)), "GFLOP per round, all clients together"
    flops: Frame = pd.DataFrame.from_dict(costs, orient="index") / GIGA
    totals = flops.sum(axis=1)
    extra = [f"{100 * (flop / totals[fedavg] - 1):+.1f} %" for flop in totals] if fedavg else []
    # A method's first level is drawn in full colour, the next ones paler.
    turns = list(zip_longest(*(cost.items() for cost in costs.values()), fillvalue=("", 0.0)))
    long = " Every sample is counted at full window length." if experiment.instructed else ""

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 0.27 * len(costs) + 0.6)
        left = np.zeros(len(costs))
        colours = [canvas.colour(look[label]) for label in costs]
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
        axis.set_xlabel(what)
        canvas.legend(figure, axis)
        return figure

    table = frame_table(what, "method", flops.assign(total=totals), ",.1f")
    if fedavg:
        rows = [[*row, more] for row, more in zip(table.rows, extra, strict=True)]
        table = replace(table, columns=[*table.columns, "relative to fedavg"], rows=rows)
    return Picture(
        "flops",
        "Floating-point operations per round",
        "Matrix multiplications of the forward and backward passes, measured on one training "
        "step per level and scaled to one round of all clients; router phases are weighted "
        f"by their frequency.{' Percentages are relative to FedAvg.' if fedavg else ''}{long}",
        f"Bar chart of operations per round by level for {listed(costs)}; the table lists the "
        "values.",
        draw,
        table,
    )

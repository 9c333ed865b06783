"""What learning together costs: bytes that travel, and operations beyond FedAvg's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.flops import Cost, costs_by_label
from coterie.analysis.tables import Table, listed
from coterie.errors import CoterieError
from coterie.messages.names import BYTES_DOWN, BYTES_UP
from coterie.report.style import Canvas, LeftOut, Picture, looks

WAYS = {BYTES_UP: "upload", BYTES_DOWN: "download"}
MEGA, GIGA = 1e6, 1e9


def traffic(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Bytes per client and round, of each label."""
    found = {
        label: {way: _bytes(runs[0], way) for way in WAYS}
        for label, runs in experiment.drawn.items()
        if runs[0].rounds
    }
    if not found:
        yield LeftOut("Traffic", "no run has finished a round")
        return
    yield _traffic(experiment, found)


def _bytes(run: ReportedRun, way: str) -> np.ndarray:
    """Bytes of every client and round: the first message of a round, as others serve evaluation."""
    first = run.by_client(way).groupby(["client", "round"]).first()
    return first.to_numpy() if len(first) else np.zeros(1)


def _traffic(experiment: Experiment, found: dict[str, dict[str, np.ndarray]]) -> Picture:
    look = looks(list(experiment.runs))

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            2, 0.24 * len(found) + 0.6, 2, "MB per client and round", sharex=True, sharey=True
        )
        for axis, (way, title) in zip(axes, WAYS.items(), strict=True):
            sizes = [ways[way] / MEGA for ways in found.values()]
            means = [size.mean() for size in sizes]
            spans = np.abs([[size.min(), size.max()] for size in sizes] - np.c_[means]).T
            colours = [canvas.colour(look[label]) for label in found]
            error = {"ecolor": canvas.theme.ink, "elinewidth": 1.8}
            bars = axis.barh(
                range(len(found)), means, 0.62, color=colours, xerr=spans, error_kw=error
            )
            axis.bar_label(bars, [f"{mean:.2f}" for mean in means], fontsize=8.5, padding=2)
            axis.set_title(title)
            axis.set_yticks(range(len(found)), list(found))
            axis.grid(axis="y", visible=False)
            axis.margins(x=0.2)
        axes[0].invert_yaxis()
        return figure

    rows = [
        [label, *(f"{s:,.0f}" for way in WAYS for s in (ways[way].mean(), ways[way].max()))]
        for label, ways in found.items()
    ]
    heads = [f"{title}, {what}" for title in WAYS.values() for what in ("mean", "most")]
    return Picture(
        "traffic",
        "Traffic per client and round",
        "Bytes of encoded messages, mean over clients and rounds (1 MB = 10^6 bytes). Dark "
        "lines span the minimum to the maximum where they differ.",
        f"Bar chart of upload and download per client and round for {listed(found)}.",
        draw,
        Table("Bytes per client and round", ["method", *heads], rows),
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
    costs = {label: cost for label, cost in found.items() if isinstance(cost, Cost)}
    fedavg = [costs[n] for n, run in experiment.first if n in costs and run.method == "fedavg"]
    if costs:
        yield _operations(experiment, costs, fedavg[0] if fedavg else None)


def _operations(experiment: Experiment, costs: dict[str, Cost], fedavg: Cost | None) -> Picture:
    look = looks(list(experiment.runs))
    every = [list(mine.levels) for mine in costs.values()]
    levels = list(dict.fromkeys(level for names in every for level in names))
    most = max(map(len, every))
    # A method's first level is drawn in full colour, the next ones paler.
    turns = [
        listed(dict.fromkeys(n[place] for n in every if len(n) > place)) for place in range(most)
    ]

    long = " Every sample is counted at full window length." if experiment.instructed else ""

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 0.27 * len(costs) + 0.6)
        left = np.zeros(len(costs))
        colours = [canvas.colour(look[label]) for label in costs]
        for turn, names in enumerate(turns):
            shown: Any = {"height": 0.62, "alpha": 0.5**turn}
            steps = [[*cost.levels.values(), *[0.0] * most][turn] / GIGA for cost in costs.values()]
            axis.barh(range(len(costs)), steps, left=left, color=colours, **shown)
            axis.barh(0, 0, color=canvas.theme.quiet, **shown, label=names)
            left += steps
        if fedavg:
            bars = axis.barh(range(len(costs)), left, color="none")
            extra = [_extra(mine, fedavg) for mine in costs.values()]
            axis.bar_label(bars, extra, fontsize=8.5, padding=2)
        axis.set_yticks(range(len(costs)), list(costs))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.14)
        axis.set_xlabel("GFLOP per round, all clients together")
        canvas.legend(figure, axis)
        return figure

    rows = [
        [
            label,
            *(f"{mine.levels[n] / GIGA:,.1f}" if n in mine.levels else "" for n in levels),
            f"{mine.total / GIGA:,.1f}",
            *([_extra(mine, fedavg)] if fedavg else []),
        ]
        for label, mine in costs.items()
    ]
    return Picture(
        "flops",
        "Floating-point operations per round",
        "Matrix multiplications of the forward and backward passes, measured on one training "
        "step per level and scaled to one round of all clients; router phases are weighted "
        f"by their frequency.{' Percentages are relative to FedAvg.' if fedavg else ''}{long}",
        f"Bar chart of operations per round by level for {listed(costs)}; the table lists the "
        "values.",
        draw,
        Table(
            "GFLOP per round, all clients together",
            ["method", *levels, "total", *(["relative to fedavg"] if fedavg else [])],
            rows,
        ),
    )


def _extra(mine: Cost, fedavg: Cost) -> str:
    return f"{100 * (mine.total / fedavg.total - 1):+.1f} %"

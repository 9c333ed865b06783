"""What learning together costs: bytes that travel, and operations beyond FedAvg's."""

from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.flops import Cost, counting_base, round_cost
from coterie.analysis.tables import Table, listed
from coterie.bases import Base
from coterie.config import RunConfig, parse
from coterie.errors import CoterieError
from coterie.federation import EVERYONE
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
            for place, label in enumerate(found):
                size = found[label][way] / MEGA
                axis.barh(place, size.mean(), 0.62, color=canvas.colour(look[label]))
                if size.min() < size.max():
                    axis.plot([size.min(), size.max()], [place, place], color=canvas.theme.ink)
                axis.text(size.max(), place, f" {size.mean():.2f}", va="center", fontsize=8.5)
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
    settings = experiment.all[0].config  # an experiment has the same bases and server
    if settings.get("bases") or settings.get("server"):
        why = "not counted if clients have different bases or the server has a model"
        yield LeftOut(title, why)
        return
    base: Base | None = None
    costs: dict[str, Cost] = {}
    fedavg: Cost | None = None
    for label, run in experiment.first:
        if not run.names("loss/"):
            continue  # it trains nothing, or has not begun
        try:
            config = parse(run.config)
            base = base or counting_base(config)  # an experiment has one base
            cost = _cost(config, base, experiment.clients)
        except CoterieError as error:
            yield LeftOut(f"{title} of {label}", str(error))
            continue
        if cost is None:
            yield LeftOut(f"{title} of {label}", "the training has no levels")
            continue
        costs[label] = cost
        if config.label == "fedavg":
            fedavg = fedavg or cost
    if costs:
        yield _operations(experiment, costs, fedavg)


def _cost(config: RunConfig, base: Base, clients: list[str]) -> Cost | None:
    """A run's cost of a round; None if it has no levels."""
    apart = {client: [client] for client in clients}
    return round_cost(config, base, {EVERYONE: clients} if config.pooled else apart)


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
        for place, (label, mine) in enumerate(costs.items()):
            left = 0.0
            for turn, cost in enumerate(mine.levels.values()):
                colour = canvas.colour(look[label])
                axis.barh(place, cost / GIGA, 0.62, left, color=colour, alpha=0.5**turn)
                left += cost / GIGA
            if fedavg:
                axis.text(left, place, f" {_extra(mine, fedavg)}", va="center", fontsize=8.5)
        for turn, names in enumerate(turns):
            axis.barh(0, 0, color=canvas.theme.quiet, alpha=0.5**turn, label=names)
        axis.set_yticks(range(len(costs)), list(costs))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.margins(x=0.14)
        axis.set_xlabel("GFLOP per round, all clients together")
        canvas.legend(figure, axis, max(map(len, turns)))
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

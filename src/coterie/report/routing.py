"""Figure of routing weights over rounds: a panel per client and expert, and a line per layer."""

from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Frame
from coterie.analysis.tables import Table, listed
from coterie.files import path_part
from coterie.messages.names import ROUTING
from coterie.report.figures import ReportFigure
from coterie.report.style import Canvas, LeftOut, Picture


class Routing(ReportFigure):
    """A figure of routing weights for each label whose runs have routers.

    A label is a method with its settings.
    """

    name = "routing"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        routed = [label for label, run in experiment.first if run.has_routers]
        if not routed:
            reason = "no run recorded routing weights over a fixed set of experts"
            yield LeftOut("Expert scores", reason)
        for label in routed:
            yield _scores(label, [r for r in experiment.drawn[label] if r.has_routers])


def _scores(label: str, runs: Sequence[ReportedRun]) -> Picture:
    layers = runs[0].names(ROUTING)
    seeds = [pd.concat({layer: run.by_client(layer) for layer in layers}) for run in runs]
    # A row per layer, client and round; a column per expert. Clients may have different experts.
    means: Frame = pd.concat(seeds).groupby(level=[0, 1, 2]).mean()
    counts = means.groupby("client").first().count(axis=1)
    experts = {client: runs[0].expert_names(client, count) for client, count in counts.items()}
    panels: dict[tuple[str, str], Frame] = {}  # a row per round, a column per layer
    for client, names in experts.items():
        client_means = means.xs(client, level="client")
        for expert, name in enumerate(names):
            weights = client_means[expert].unstack(0)
            panels[str(client), name] = weights[[n for n in layers if n in weights]]
    deepest = max(len(weights.columns) for weights in panels.values())

    def draw(canvas: Canvas) -> Figure:
        colours = canvas.depths(deepest)
        most = max(map(len, experts.values()))
        # More than 4 panels side by side (8 on a wide page) would be illegible.
        across = (min(most, 4), min(most, 8)) if most > 2 else (2, 4)
        figure, axes = canvas.panels(
            len(panels), 1.7, across, "round", "mean weight", sharex=True, sharey=True
        )
        for axis, (names, weights) in zip(axes, panels.items(), strict=True):
            for depth, layer in enumerate(weights):
                axis.plot(weights[layer], color=colours(depth), marker="o", markersize=3)
            axis.set_title("\n".join(names), fontsize=9)
            axis.set_ylim(-0.03, 1.03)
        depths = ScalarMappable(Normalize(0.5, deepest + 0.5), colours)
        ticks = MaxNLocator(8, integer=True)
        figure.set_figheight(figure.get_figheight() + 0.5)
        figure.colorbar(
            depths, ax=axes, label="layer", ticks=ticks, location="bottom", shrink=0.5, aspect=40
        )
        return figure

    last = {names: [f"{w:.3f}" for w in weights.iloc[-1]] for names, weights in panels.items()}
    return Picture(
        f"routing-{path_part(label)}",
        f"Expert scores of {label}",
        "Mean routing weight of each expert over the tokens of a round's last batch, with one "
        "line per layer, coloured by depth. Mean over seeds.",
        f"Line plot of the mean routing weight by round for each expert of {listed(experts)}, with "
        f"one line for each of {deepest} layers. The table lists the mean routing weights in the "
        "last round.",
        draw,
        Table(
            "Mean routing weights in the last round, by layer",
            ["client", "expert", *(str(n + 1) for n in range(deepest))],
            [[*names, *cells, *[""] * (deepest - len(cells))] for names, cells in last.items()],
        ),
    )

"""Routers' weights per layer over rounds: whom each client's tokens go to, as it learns."""

from collections.abc import Iterator, Sequence

import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Column, Frame
from coterie.analysis.routers import expert_names, has_routers
from coterie.analysis.tables import Table, listed
from coterie.files import path_part
from coterie.messages.names import ROUTING
from coterie.report.style import Canvas, LeftOut, Picture


def routing(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """A figure per label whose runs have routers."""
    routed = [label for label, run in experiment.first if has_routers(run)]
    if not routed:
        yield LeftOut("Expert scores", "no run has routers over a fixed set of experts")
    for label in routed:
        yield _scores(label, [r for r in experiment.drawn[label] if has_routers(r)])


def _scores(label: str, runs: Sequence[ReportedRun]) -> Picture:
    layers = runs[0].names(ROUTING)
    seeds = [pd.concat({layer: run.by_client(layer) for layer in layers}) for run in runs]
    # By layer, client and round; a column per expert, of which clients may have fewer than others.
    means: Frame = pd.concat(seeds).groupby(level=[0, 1, 2]).mean()
    counts = means.loc[layers[0]].groupby("client").first().count(axis=1)
    experts = {client: expert_names(runs[0], client, count) for client, count in counts.items()}
    clients = list(experts)
    panels = [(client, n) for client in clients for n in range(len(experts[client]))]

    def weights(client: str, expert: int, layer: str) -> Column:
        return means.loc[(layer, client), expert]

    def draw(canvas: Canvas) -> Figure:
        colours = canvas.depths(len(layers))
        most = max(map(len, experts.values()))
        across = most if most > 2 else (2 if canvas.narrow else 4)
        across = min(across, 4 if canvas.narrow else 8)  # more are too narrow to draw
        figure, axes = canvas.panels(
            len(panels), 1.7, across, "round", "mean weight", sharex=True, sharey=True
        )
        for axis, (client, expert) in zip(axes, panels, strict=True):
            for depth, layer in enumerate(layers):
                mean = weights(client, expert, layer)
                axis.plot(mean, color=colours(depth), marker="o", markersize=3)
            axis.set_title(f"{client}\n{experts[client][expert]}", fontsize=9)
            axis.set_ylim(-0.03, 1.03)
        depths = ScalarMappable(Normalize(0.5, len(layers) + 0.5), colours)
        ticks = MaxNLocator(8, integer=True)
        figure.set_figheight(figure.get_figheight() + 0.5)
        figure.colorbar(
            depths, ax=axes, label="layer", ticks=ticks, location="bottom", shrink=0.5, aspect=40
        )
        return figure

    rows = [
        [
            client,
            experts[client][n],
            *(f"{weights(client, n, layer).iloc[-1]:.3f}" for layer in layers),
        ]
        for client, n in panels
    ]
    return Picture(
        f"routing-{path_part(label)}",
        f"Expert scores of {label}",
        "Mean router weight of each expert over the tokens of a round's last batch, with one "
        "line per layer, coloured by depth. Mean over seeds.",
        f"Line plot of the mean routing weight by round for each of {listed(clients)} and "
        f"each expert, with one line for each of {len(layers)} layers.",
        draw,
        Table(
            "Mean weights in the last round, by layer",
            ["client", "expert", *(str(n + 1) for n in range(len(layers)))],
            rows,
        ),
    )

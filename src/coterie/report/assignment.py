"""Which experts a server gave to whom: who holds what, how many, and what two clients share.

FedAMoLE's experts choose their clients anew every round, on every layer by itself.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.experiments import Experiment, ReportedRun, chosen_layers
from coterie.analysis.frame import Column, Frame
from coterie.analysis.tables import Table, frame_table, listed
from coterie.files import path_part
from coterie.messages.names import ASSIGNMENT
from coterie.report.plots import evenly, lines_by_client, of_pairs
from coterie.report.style import Canvas, LeftOut, Picture


def holdings(run: ReportedRun) -> Frame:
    """Who held which expert, as a run's server recorded it: a column per expert, true or false.

    A row per round (one counts if every layer was recorded), layer (a path, as the server named it)
    and client, in this order.
    """
    found = {name.removeprefix(ASSIGNMENT): run.by_round(name) for name in run.names(ASSIGNMENT)}
    rounds = sorted(set.intersection(*map(set, found.values())))
    given = [layer[round] for round in rounds for layer in found.values()]
    clients = sorted({client for one in given for client in one})
    experts = 1 + max((n for one in given for ids in one.values() for n in ids), default=0)
    held = np.zeros((len(given), len(clients), experts), dtype=bool)
    for place, one in enumerate(given):
        for client, ids in one.items():
            held[place, clients.index(client), ids] = True
    layers = pd.Categorical(list(found), list(found))  # in their own order
    names = ["round", "layer", "client"]
    index = pd.MultiIndex.from_product([rounds, layers, clients], names=names)
    return pd.DataFrame(held.reshape(-1, experts), index)


def shared(held: Frame) -> Frame:
    """|A & B| / |A | B| of two clients' experts in a round, mean over layers.

    NaN where neither holds any expert on any layer.
    """
    shares = []
    for _, own in held.astype(float).groupby("layer", observed=True):
        own = own.droplevel("layer")
        both, sizes = own @ own.T, own.sum(axis=1).to_numpy()
        shares.append(both / (np.add.outer(sizes, sizes) - both))
    return pd.concat(shares).groupby("client").mean()


def assignment(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Three figures for each label whose runs assign experts, of the run with the first seed."""
    every = {label: holdings(run) for label, run in experiment.first if run.names(ASSIGNMENT)}
    found = {label: held for label, held in every.items() if held.size}
    if not found:
        yield LeftOut("Experts of each client", "no run uses a method that assigns experts")
    for label, held in found.items():
        yield _who_holds_what(label, held)
        if len(held.index.unique("round")) > 1:
            yield _how_many(label, held)
        yield _in_common(label, held)


def _who_holds_what(label: str, held: Frame) -> Picture:
    layers, rounds, clients = (list(held.index.unique(n)) for n in ("layer", "round", "client"))
    places, times = (
        [every[n] for n in chosen_layers(None, len(every))] for every in (layers, rounds)
    )
    experts, panels = len(held.columns), list(product(places, times))

    def draw(canvas: Canvas) -> Figure:
        paper, colour, lines = canvas.theme.paper, canvas.theme.colours[2], canvas.theme.lines
        height = max(0.17 * len(clients), 0.5) + 0.6
        across = (len(times), len(times))
        figure, axes = canvas.panels(
            len(panels), height, across, "expert", sharex=True, sharey=True
        )
        for axis, (layer, round) in zip(axes, panels, strict=True):
            axis.pcolormesh(
                range(experts), range(len(clients)), held.loc[(round, layer)], vmin=0, vmax=1,
                cmap=ListedColormap([paper, colour]), edgecolors=lines, linewidth=0.7,
            )  # fmt: skip
            where = f"{layer}\n" if round == times[0] else ""  # once in a row of panels
            axis.set_title(f"{where}round {round}", fontsize=9, loc="left")
            axis.set_yticks(range(len(clients)), clients)
            axis.xaxis.set_major_locator(MaxNLocator(3 if canvas.narrow else 6, integer=True))
            axis.grid(False)
            axis.spines[:].set_visible(False)
        axes[0].invert_yaxis()
        for name, face in (("held", colour), ("not held", paper)):
            axes[0].fill_between([], [], facecolor=face, edgecolor=canvas.theme.quiet, label=name)
        canvas.legend(figure, axes[0])
        return figure

    last: Frame = held.loc[rounds[-1]]
    rows = [[client, *(_ids(last.loc[(n, client)]) for n in places)] for client in clients]
    return Picture(
        f"experts-{path_part(label)}",
        f"Experts of each client, {label}",
        "Rows are clients, columns are domain experts; a cell is coloured if the client held "
        "the expert in that round. Each linear layer has its own experts, so the same number "
        "on two layers means two different experts."
        f"{_part('layers', places, layers)}{_part('rounds', times, rounds)} "
        "First seed only.",
        f"Heat maps of {len(clients)} clients by {experts} experts in rounds "
        f"{listed(map(str, times))} on the layers {listed(places)}; the table shows the last "
        "round.",
        draw,
        Table(f"Experts held in round {rounds[-1]}, by layer", ["client", *places], rows),
    )


def _part(what: str, shown: Sequence[object], every: Sequence[object]) -> str:
    """A sentence on what is left out, if anything is."""
    left = f" Only the first, middle and last of {len(every)} {what} are shown."
    return left if len(shown) < len(every) else ""


def _ids(held: Column) -> str:
    """Numbers of the experts that a client holds: 0, 3, 7."""
    return ", ".join(map(str, np.flatnonzero(held))) or "none"


def _how_many(label: str, held: Frame) -> Picture:
    counts: Frame = held.sum(axis=1).groupby(["round", "client"]).mean().unstack()

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 2.4, x="round", y="experts held, mean over layers")
        lines_by_client(canvas, axis, counts)
        canvas.legend(figure, axis)
        return figure

    shown = counts.iloc[evenly(len(counts), 10)].T
    return Picture(
        f"experts-held-{path_part(label)}",
        f"Number of experts per client, {label}",
        f"Out of {len(held.columns)} domain experts on each linear layer; mean over "
        f"{len(held.index.unique('layer'))} layers. First seed only.",
        f"Line plot of the number of experts held per round for {listed(counts)}.",
        draw,
        frame_table("Experts held per round, mean over layers", "client", shown, ".2f"),
    )


def _in_common(label: str, held: Frame) -> Picture:
    round = held.index[-1][0]
    shares = shared(held.loc[round]).rename_axis(index=None, columns=None)
    others = shares.mask(np.eye(len(shares), dtype=bool))
    highest = max(float(np.nan_to_num(others).max()), 1e-9)
    return Picture(
        f"experts-shared-{path_part(label)}",
        f"Experts shared by two clients, {label}",
        "Of the experts that either client holds, the share that both hold in round "
        f"{round}: 1 means identical sets, 0 means disjoint sets. Mean over "
        f"{len(held.index.unique('layer'))} layers. First seed only.",
        f"Heat map of the share of experts in common between {listed(shares)}; the table "
        "lists all values.",
        lambda canvas: of_pairs(canvas, {"": others}, 0, highest, "share of experts in common"),
        frame_table(f"Share of experts in common in round {round}", "client", shares, ".3f"),
    )

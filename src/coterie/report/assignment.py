"""Which experts a server gave to whom: who holds what, how many, and what two clients share.

FedAMoLE's experts choose their clients anew every round, on every layer by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.tables import Table, frame_table, listed
from coterie.files import path_part
from coterie.messages.names import ASSIGNMENT
from coterie.report.plots import evenly, lines_by_client, of_pairs
from coterie.report.style import Canvas, LeftOut, Picture


@dataclass(frozen=True)
class Holdings:
    """Who held which expert, on every layer, in every round."""

    clients: Sequence[str]
    layers: Sequence[str]
    """Paths of linear layers, as the server named them, from first to last."""
    rounds: Sequence[int]
    held: np.ndarray
    """(rounds, layers, clients, experts), bool"""

    def counts(self) -> np.ndarray:
        """Experts of each client and round, mean over layers: (rounds, clients)."""
        return self.held.sum(-1).mean(1)

    def shared(self) -> np.ndarray:
        """|A & B| / |A | B| of two clients' experts in the last round, mean over layers.

        (clients, clients); NaN where neither holds any expert on any layer.
        """
        last = self.held[-1].astype(float)  # (layers, clients, experts)
        both = last @ last.transpose(0, 2, 1)
        sizes = last.sum(-1)
        either = sizes[:, :, None] + sizes[:, None, :] - both
        some = either > 0
        shares = np.divide(both, either, out=np.zeros_like(both), where=some).sum(0)
        return np.divide(shares, some.sum(0), out=np.full_like(shares, np.nan), where=some.any(0))


def holdings(run: ReportedRun) -> Holdings:
    """What a run's server recorded; a round counts where it did so for every layer."""
    found = {name: run.by_round(name) for name in run.names(ASSIGNMENT)}
    rounds = sorted(set.intersection(*(set(one) for one in found.values())))
    every = [found[name][round] for round in rounds for name in found]
    clients = sorted({client for one in every for client in one})
    experts = 1 + max((n for one in every for ids in one.values() for n in ids), default=0)
    held = np.zeros((len(rounds), len(found), len(clients), experts), dtype=bool)
    for at, round in enumerate(rounds):
        for layer, one in enumerate(found.values()):
            for client, ids in one[round].items():
                held[at, layer, clients.index(client), ids] = True
    return Holdings(clients, [name.removeprefix(ASSIGNMENT) for name in found], rounds, held)


def assignment(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Three figures for each label whose runs assign experts, of the run with the first seed."""
    found = {label: holdings(run) for label, run in experiment.first if run.names(ASSIGNMENT)}
    found = {label: one for label, one in found.items() if one.held.size}
    if not found:
        yield LeftOut("Experts of each client", "no run uses a method that assigns experts")
    for label, one in found.items():
        yield _who_holds_what(label, one)
        if len(one.rounds) > 1:
            yield _how_many(label, one)
        yield _in_common(label, one)


def _some(count: int) -> list[int]:
    """The first, the middle and the last of so many."""
    return sorted({0, (count - 1) // 2, count - 1})


def _who_holds_what(label: str, one: Holdings) -> Picture:
    layers, times = _some(len(one.layers)), _some(len(one.rounds))
    clients, experts = one.held.shape[2:]
    panels = [(layer, at) for layer in layers for at in times]

    def draw(canvas: Canvas) -> Figure:
        paper, colour, lines = canvas.theme.paper, canvas.theme.colours[2], canvas.theme.lines
        height = max(0.17 * clients, 0.5) + 0.6
        figure, axes = canvas.panels(
            len(panels), height, len(times), "expert", sharex=True, sharey=True
        )
        for axis, (layer, at) in zip(axes, panels, strict=True):
            axis.pcolormesh(
                range(experts), range(clients), one.held[at, layer], vmin=0, vmax=1,
                cmap=ListedColormap([paper, colour]), edgecolors=lines, linewidth=0.7,
            )  # fmt: skip
            where = f"{one.layers[layer]}\n" if at == times[0] else ""  # once in a row of panels
            axis.set_title(f"{where}round {one.rounds[at]}", fontsize=9, loc="left")
            axis.set_yticks(range(clients), one.clients)
            axis.xaxis.set_major_locator(MaxNLocator(3 if canvas.narrow else 6, integer=True))
            axis.grid(False)
            axis.spines[:].set_visible(False)
        axes[0].invert_yaxis()
        for name, face in (("held", colour), ("not held", paper)):
            axes[0].fill_between([], [], facecolor=face, edgecolor=canvas.theme.quiet, label=name)
        canvas.legend(figure, axes[0])
        return figure

    rows = [
        [client, *(_ids(one.held[-1, layer, place]) for layer in layers)]
        for place, client in enumerate(one.clients)
    ]
    return Picture(
        f"experts-{path_part(label)}",
        f"Experts of each client, {label}",
        "Rows are clients, columns are domain experts; a cell is coloured if the client held "
        "the expert in that round. Each linear layer has its own experts, so the same number "
        "on two layers means two different experts."
        f"{_part('layers', layers, len(one.layers))}{_part('rounds', times, len(one.rounds))} "
        "First seed only.",
        f"Heat maps of {clients} clients by {experts} experts in rounds "
        f"{listed(str(one.rounds[at]) for at in times)} on the layers "
        f"{listed(one.layers[layer] for layer in layers)}; the table shows the last round.",
        draw,
        Table(
            f"Experts held in round {one.rounds[-1]}, by layer",
            ["client", *(one.layers[layer] for layer in layers)],
            rows,
        ),
    )


def _part(what: str, shown: Sequence[int], count: int) -> str:
    """A sentence on what is left out, if anything is."""
    return (
        f" Only the first, middle and last of {count} {what} are shown."
        if len(shown) < count
        else ""
    )


def _ids(held: np.ndarray) -> str:
    """Numbers of the experts that a client holds: 0, 3, 7."""
    return ", ".join(map(str, np.flatnonzero(held))) or "none"


def _how_many(label: str, one: Holdings) -> Picture:
    counts = pd.DataFrame(one.counts(), list(one.rounds), list(one.clients))
    experts = one.held.shape[3]

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 2.4, 1, "round", "experts held, mean over layers")
        lines_by_client(canvas, axis, counts)
        canvas.legend(figure, axis)
        return figure

    shown = counts.iloc[evenly(len(counts), 10)].T
    return Picture(
        f"experts-held-{path_part(label)}",
        f"Number of experts per client, {label}",
        f"Out of {experts} domain experts on each linear layer; mean over {len(one.layers)} "
        "layers. First seed only.",
        f"Line plot of the number of experts held per round for {listed(one.clients)}.",
        draw,
        frame_table("Experts held per round, mean over layers", "client", shown, ".2f"),
    )


def _in_common(label: str, one: Holdings) -> Picture:
    shares = pd.DataFrame(one.shared(), list(one.clients), list(one.clients))
    others = shares.mask(np.eye(len(shares), dtype=bool))
    last = one.rounds[-1]
    highest = max(float(np.nan_to_num(others).max()), 1e-9)

    return Picture(
        f"experts-shared-{path_part(label)}",
        f"Experts shared by two clients, {label}",
        "Of the experts that either client holds, the share that both hold in round "
        f"{last}: 1 means identical sets, 0 means disjoint sets. Mean over "
        f"{len(one.layers)} layers. First seed only.",
        f"Heat map of the share of experts in common between {listed(one.clients)}; the table "
        "lists all values.",
        lambda canvas: of_pairs(canvas, {"": others}, 0, highest, "share of experts in common"),
        frame_table(f"Share of experts in common in round {last}", "client", shares, ".3f"),
    )

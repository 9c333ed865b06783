"""Which experts a server gave to whom: who holds what, how many, and what two clients share.

FedAMoLE's experts choose their clients anew every round, on every layer by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.routers import ASSIGNED
from coterie.analysis.tables import Table, listed, table_rows
from coterie.files import path_part
from coterie.report.plots import annotate
from coterie.report.style import DASHES, MARKERS, Canvas, LeftOut, Picture


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
    found = {name: run.by_round(name) for name in run.names(ASSIGNED)}
    rounds = sorted(set.intersection(*(set(one) for one in found.values())))
    every = [found[name][round] for round in rounds for name in found]
    clients = sorted({client for one in every for client in one})
    experts = 1 + max((n for one in every for ids in one.values() for n in ids), default=0)
    held = np.zeros((len(rounds), len(found), len(clients), experts), dtype=bool)
    for at, round in enumerate(rounds):
        for layer, one in enumerate(found.values()):
            for client, ids in one[round].items():
                held[at, layer, clients.index(client), ids] = True
    return Holdings(clients, [name.removeprefix(ASSIGNED) for name in found], rounds, held)


def assignment(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Three figures for each label whose runs assign experts, of the run with the first seed."""
    found = {label: holdings(run) for label, run in experiment.first if run.names(ASSIGNED)}
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
        colours = ListedColormap([canvas.theme.paper, canvas.theme.colours[2]])
        height = max(0.17 * clients, 0.5) + 0.6
        figure, axes = canvas.panels(
            len(panels), height, len(times), "expert", sharex=True, sharey=True
        )
        for axis, (layer, at) in zip(axes, panels, strict=True):
            axis.imshow(one.held[at, layer], cmap=colours, vmin=0, vmax=1, aspect="auto")
            where = f"{one.layers[layer]}\n" if at == times[0] else ""  # once in a row of panels
            axis.set_title(f"{where}round {one.rounds[at]}", fontsize=9, loc="left")
            axis.set_yticks(range(clients), one.clients)
            axis.xaxis.set_major_locator(MaxNLocator(3 if canvas.narrow else 6, integer=True))
            _cells(axis, canvas, clients, experts)
        keys = [
            Patch(facecolor=colours(float(held)), edgecolor=canvas.theme.quiet, label=label)
            for held, label in ((True, "held"), (False, "not held"))
        ]
        figure.set_figheight(figure.get_figheight() + 0.25)
        place: Any = "outside lower center"
        figure.legend(handles=keys, loc=place, ncols=2)
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


def _cells(axis: Axes, canvas: Canvas, rows: int, columns: int) -> None:
    """Thin lines between a heat map's cells, and no others."""
    axis.grid(False)
    axis.spines[:].set_visible(False)
    axis.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axis.grid(True, which="minor", color=canvas.theme.lines, linewidth=0.7)
    axis.tick_params(which="minor", length=0)


def _how_many(label: str, one: Holdings) -> Picture:
    counts = one.counts()
    experts = one.held.shape[3]

    def draw(canvas: Canvas) -> Figure:
        figure, (axis,) = canvas.panels(1, 2.4, 1, "round", "experts held, mean over layers")
        colours = canvas.theme.colours[2:]
        for n, client in enumerate(one.clients):
            axis.plot(
                one.rounds, counts[:, n], color=colours[n % len(colours)], label=client,
                marker=MARKERS[n % len(MARKERS)], linestyle=DASHES[n // len(colours) % len(DASHES)],
            )  # fmt: skip
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        canvas.legend(figure, axis, max(map(len, one.clients)))
        return figure

    shown = sorted({round(n) for n in np.linspace(0, len(one.rounds) - 1, 10)})
    rows = [
        [client, *(f"{counts[at, n]:.2f}" for at in shown)] for n, client in enumerate(one.clients)
    ]
    return Picture(
        f"experts-held-{path_part(label)}",
        f"Number of experts per client, {label}",
        f"Out of {experts} domain experts on each linear layer; mean over {len(one.layers)} "
        "layers. First seed only.",
        f"Line plot of the number of experts held per round for {listed(one.clients)}.",
        draw,
        Table(
            "Experts held per round, mean over layers",
            ["client", *(str(one.rounds[at]) for at in shown)],
            rows,
        ),
    )


def _in_common(label: str, one: Holdings) -> Picture:
    shares, clients = one.shared(), len(one.clients)
    others = np.where(np.eye(clients, dtype=bool), np.nan, shares)
    highest = max(float(np.nan_to_num(others).max()), 1e-9)

    def draw(canvas: Canvas) -> Figure:
        names = 0.075 * max(map(len, one.clients))  # inches
        side = min(canvas.width - names - 1.2, 0.45 * clients + 0.4)
        figure = canvas.figure(side + names + 0.4)
        axis = figure.subplots()
        image = axis.imshow(others, cmap=canvas.heat(), vmin=0, vmax=highest)
        axis.set_xticks(range(clients), one.clients, rotation=90)
        axis.set_yticks(range(clients), one.clients)
        _cells(axis, canvas, clients, clients)
        if side / clients > 0.33:
            words = np.where(np.isnan(others), "", np.vectorize("{:.2f}".format)(others))
            annotate(axis, np.nan_to_num(others) / highest, canvas, words)
        figure.colorbar(image, ax=axis, label="share of experts in common")
        return figure

    return Picture(
        f"experts-shared-{path_part(label)}",
        f"Experts shared by two clients, {label}",
        "Of the experts that either client holds, the share that both hold in round "
        f"{one.rounds[-1]}: 1 means identical sets, 0 means disjoint sets. Mean over "
        f"{len(one.layers)} layers. First seed only.",
        f"Heat map of the share of experts in common between {listed(one.clients)}; the table "
        "lists all values.",
        draw,
        Table(
            f"Share of experts in common in round {one.rounds[-1]}",
            ["client", *one.clients],
            table_rows(pd.DataFrame(shares, list(one.clients)), ".3f"),
        ),
    )

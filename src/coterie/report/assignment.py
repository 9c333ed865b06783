"""Figures that show which experts FedAMoLE's clients hold, how many, and how many are shared.

In every round and separately on every layer, FedAMoLE's experts choose the clients that hold them.
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
from coterie.report.figures import ReportFigure
from coterie.report.plots import evenly, lines_by_client, of_pairs
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture


def holdings(run: ReportedRun) -> Frame:
    """Return which experts each client held in each round of a run.

    Returns:
        A frame of booleans. There is a column for each expert, and a row for each combination of
        round, path of a layer, and client. A round is omitted if, for at least one layer, the run's
        metrics do not contain the assignment of experts in this round.
    """
    by_layer = {name.removeprefix(ASSIGNMENT): run.by_round(name) for name in run.names(ASSIGNMENT)}
    rounds = sorted(set.intersection(*map(set, by_layer.values())))
    assignments = [layer[round] for round in rounds for layer in by_layer.values()]
    clients = sorted({client for assigned in assignments for client in assigned})
    numbers = (n for assigned in assignments for ids in assigned.values() for n in ids)
    experts = 1 + max(numbers, default=0)
    held = np.zeros((len(assignments), len(clients), experts), dtype=bool)
    for row, assigned in enumerate(assignments):
        for client, ids in assigned.items():
            held[row, clients.index(client), ids] = True
    layers = pd.Categorical(list(by_layer), list(by_layer))  # keeps the layers' order
    names = ["round", "layer", "client"]
    index = pd.MultiIndex.from_product([rounds, layers, clients], names=names)
    return pd.DataFrame(held.reshape(-1, experts), index)


def shared(held: Frame) -> Frame:
    """Compute the overlap between the experts of each pair of clients, averaged over layers.

    On each layer, the overlap of two sets of experts is the number of experts in both sets, divided
    by the number of experts in at least one of the sets.

    Args:
        held: The rows for a single round, taken from the frame that `holdings` returned.

    Returns:
        A frame with a row and a column per client. A value is NaN if neither client holds an expert
        on any layer.
    """
    shares = []
    for _, layer in held.astype(float).groupby("layer", observed=True):
        layer = layer.droplevel("layer")
        common, sizes = layer @ layer.T, layer.sum(axis=1).to_numpy()
        shares.append(common / (np.add.outer(sizes, sizes) - common))
    return pd.concat(shares).groupby("client").mean()


class Assignment(ReportFigure):
    """Figures of the experts held by clients, for methods that assign experts to clients.

    There is a set of figures for each label (method and settings), and the figures show the label's
    run with the smallest seed.
    """

    name = "assignment"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        runs = {label: holdings(run) for label, run in experiment.first if run.names(ASSIGNMENT)}
        holdings_by_label = {label: held for label, held in runs.items() if held.size}
        if not holdings_by_label:
            reason = "no run recorded which client holds which expert"
            yield LeftOut("Experts of each client", reason)
        for label, held in holdings_by_label.items():
            yield _held_experts(label, held)
            if len(held.index.unique("round")) > 1:
                yield _counts(label, held)
            yield _overlap(label, held)


def _held_experts(label: str, held: Frame) -> Picture:
    layers, rounds, clients = (list(held.index.unique(n)) for n in ("layer", "round", "client"))
    shown_layers, shown_rounds = (
        [values[n] for n in chosen_layers(None, len(values))] for values in (layers, rounds)
    )
    experts, panels = len(held.columns), list(product(shown_layers, shown_rounds))

    def draw(canvas: Canvas) -> Figure:
        paper, colour, lines = canvas.theme.paper, canvas.theme.colours[2], canvas.theme.lines
        height = max(0.17 * len(clients), 0.5) + 0.6
        across = (len(shown_rounds), len(shown_rounds))
        figure, axes = canvas.panels(
            len(panels), height, across, "expert", sharex=True, sharey=True
        )
        for axis, (layer, round) in zip(axes, panels, strict=True):
            axis.pcolormesh(
                range(1, experts + 1), range(len(clients)), held.loc[(round, layer)],
                vmin=0, vmax=1,
                cmap=ListedColormap([paper, colour]), edgecolors=lines, linewidth=0.7,
            )  # fmt: skip
            heading = f"{layer}\n" if round == shown_rounds[0] else ""  # once per row of panels
            axis.set_title(f"{heading}round {round}", fontsize=9, loc="left")
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
    rows = [[client, *(_ids(last.loc[(n, client)]) for n in shown_layers)] for client in clients]
    return Picture(
        f"experts-{path_part(label)}",
        f"Experts of each client, {label}",
        "Rows are clients, columns are domain experts (the experts that are assigned to clients); "
        "a cell is coloured if the client held the expert in the panel's round. Each linear layer "
        "has its own experts, so the same number on two layers means two different experts."
        f"{_selection('layers', shown_layers, layers)}"
        f"{_selection('rounds', shown_rounds, rounds)} {SMALLEST_SEED}",
        f"Heat maps of {len(clients)} clients by {experts} experts in rounds "
        f"{listed(map(str, shown_rounds))} on the layers {listed(shown_layers)}; the table shows "
        "the last round.",
        draw,
        Table(f"Experts held in round {rounds[-1]}, by layer", ["client", *shown_layers], rows),
    )


def _selection(kind: str, shown: Sequence[object], values: Sequence[object]) -> str:
    """Return a sentence that says which layers or rounds are shown.

    The sentence is empty if all layers or rounds are shown.

    Args:
        kind: "layers" or "rounds".
        shown: The layers or rounds that are shown.
        values: All layers or rounds.
    """
    sentence = f" Only the first, middle and last of {len(values)} {kind} are shown."
    return sentence if len(shown) < len(values) else ""


def _ids(held: Column) -> str:
    """Format the numbers of the experts held by a client, counted from 1, such as `1, 4, 8`."""
    return ", ".join(map(str, np.flatnonzero(held) + 1)) or "none"


def _counts(label: str, held: Frame) -> Picture:
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
        "Number of experts that each client holds; mean over "
        f"{len(held.index.unique('layer'))} linear layers. Each of these layers has "
        f"{len(held.columns)} experts that can be assigned to clients. {SMALLEST_SEED}",
        f"Line plot of the number of experts held per round for {listed(counts)}.",
        draw,
        frame_table("Experts held per round, mean over layers", "client", shown, ".2f"),
    )


def _overlap(label: str, held: Frame) -> Picture:
    round = held.index[-1][0]
    shares = shared(held.loc[round]).rename_axis(index=None, columns=None)
    others = shares.mask(np.eye(len(shares), dtype=bool))
    highest = max(float(np.nan_to_num(others).max()), 1e-9)
    return Picture(
        f"experts-shared-{path_part(label)}",
        f"Experts shared by two clients, {label}",
        "Experts that both clients hold, as a share of the experts that at least one of them "
        f"holds, in round {round}: 1 for identical sets, 0 for disjoint sets. Mean over "
        f"{len(held.index.unique('layer'))} layers. {SMALLEST_SEED}",
        f"Heat map of the share of experts in common between {listed(shares)}; the table "
        "lists all values.",
        lambda canvas: of_pairs(canvas, {"": others}, 0, highest, "share of experts in common"),
        frame_table(f"Share of experts in common in round {round}", "client", shares, ".3f"),
    )

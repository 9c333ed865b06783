"""Figures of trust weights: each client's weights for all clients' uploads, over rounds.

The weights are recorded by PCL, by auto after each decision, and by CoBo and FedFomo.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Frame
from coterie.analysis.peers import sentences
from coterie.analysis.tables import frame_table, listed
from coterie.files import path_part
from coterie.messages.names import TRUST
from coterie.report.figures import ReportFigure
from coterie.report.plots import evenly, lines_by_client, of_pairs
from coterie.report.style import Canvas, LeftOut, Picture, number

Matrices = Mapping[int, Frame]
"""For each round, a frame of trust weights.

A row contains the weights with which one client averages all clients' updates. A column contains
the weights that all clients give to one client's update.
"""


class Trust(ReportFigure):
    """Heat maps and line plots for each label whose runs recorded trust weights.

    A label is a method with its settings.
    """

    name = "trust"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        labels = [label for label, run in experiment.first if run.names(TRUST)]
        if not labels:
            yield LeftOut("Trust weights", "no run recorded trust weights")
        for label in labels:
            weights = trust_matrices([run for run in experiment.drawn[label] if run.names(TRUST)])
            yield _heat_maps(label, weights, sentences(experiment.drawn[label][0], experiment.all))
            if len(next(iter(weights.values()))) > 2:
                yield _others(label, weights)
            if len(weights) > 1:
                yield _evolution(label, weights)


def trust_matrices(runs: Sequence[ReportedRun]) -> Matrices:
    """Average the trust weights of several runs over seeds, for each round with new weights.

    A client without new weights in a round keeps its last ones. Before a client's first weights,
    its row is NaN. Clients of PCL average their models before they train in a round, and once more
    after the training of the last round. The last round may therefore have two sets of weights, of
    which the later set is used.
    """
    recorded: list[Frame] = [run.by_client(TRUST) for run in runs]
    clients = sorted({n for f in recorded for n in (*f.columns, *f.index.unique("client"))})
    rounds = sorted({round for frame in recorded for round in frame.index.unique("round")})
    every = pd.MultiIndex.from_product([clients, rounds], names=["client", "round"])
    by_run: list[Frame] = []
    for frame in recorded:
        last = frame.reindex(columns=clients).fillna(0.0).groupby(["client", "round"]).last()
        by_run.append(last.reindex(every).groupby("client").ffill())
    means: Frame = pd.concat(by_run).groupby(["round", "client"]).mean()
    return {round: means.loc[round].rename_axis(None) for round in rounds}


def _heat_maps(label: str, weights: Matrices, learned: Sequence[str]) -> Picture:
    highest = max(_ends(weights)[1], 1e-9)
    round, last = list(weights.items())[-1]
    return Picture(
        f"trust-{path_part(label)}",
        f"Trust matrices, {label}",
        "Rows: the client that averages all clients' uploads. Columns: the client whose upload is "
        "weighted. A client without new weights in a round keeps its last ones. Mean over seeds."
        + " The list describes the run with the smallest seed."
        * bool(learned),
        f"Heat maps of trust weights between {listed(last)} in several rounds; the table shows "
        "the last round.",
        lambda canvas: _draw(canvas, weights, 0.0, highest),
        frame_table(f"Trust weights in round {round}", "client", last, ".3f"),
        sentences=learned,
    )


def _others(label: str, weights: Matrices) -> Picture:
    """Return heat maps of the trust weights that clients give to other clients.

    The diagonal is left blank. Each client's weight for itself is so high that differences between
    the other weights would be invisible.
    """
    others = {n: frame.mask(np.eye(len(frame), dtype=bool)) for n, frame in weights.items()}
    low, high = _ends(others)
    return Picture(
        f"trust-in-others-{path_part(label)}",
        f"Trust in other clients, {label}",
        "Trust weights without the clients' weights for themselves (as in figures 3, 4 and 8 of "
        "the PCL paper). "
        f"Colours range from the lowest weight ({number(low)}) to the highest ({number(high)}).",
        f"Heat maps of trust weights between {listed(others[max(others)])}; the diagonal, which "
        "contains each client's weight for itself, is left blank.",
        lambda canvas: _draw(canvas, others, low, max(high, low + 1e-9)),
    )


def _ends(weights: Matrices) -> tuple[float, float]:
    """Return the lowest and the highest trust weight over all rounds."""
    values = pd.concat(weights)
    return float(values.min(axis=None)), float(values.max(axis=None))


def _draw(canvas: Canvas, weights: Matrices, low: float, high: float) -> Figure:
    """Draw heat maps of the trust weights in up to eight rounds, or four on a phone.

    The colours range from `low` to `high`.
    """
    rounds = list(weights)
    shown = evenly(len(rounds), 4 if canvas.narrow else 8)
    matrices = {f"round {rounds[n]}": weights[rounds[n]] for n in shown}
    return of_pairs(canvas, matrices, low, high, "trust weight")


def _evolution(label: str, weights: Matrices) -> Picture:
    frame: Frame = pd.concat(weights)
    highest = _ends(weights)[1]

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            len(frame.columns), 1.9, x="round", y="trust weight", sharex=True, sharey=True
        )
        for axis, client in zip(axes, frame, strict=True):
            lines_by_client(canvas, axis, frame.xs(client, level=1))
            axis.set_title(client)
            axis.set_ylim(0, 1.05 * highest)
        canvas.legend(figure, axes[0])
        return figure

    return Picture(
        f"trust-over-rounds-{path_part(label)}",
        f"Trust over rounds, {label}",
        "One panel per client: the client's trust weights for all clients, including itself. "
        "Mean over seeds.",
        f"Line plot of trust weights by round, with one panel for each of {listed(frame)}.",
        draw,
    )

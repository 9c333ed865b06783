"""Whom each client trusts: its weights of the others' updates, and how they change (PCL)."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Frame
from coterie.analysis.tables import frame_table, listed
from coterie.files import path_part
from coterie.messages.names import TRUST
from coterie.report.plots import evenly, lines_by_client, of_pairs
from coterie.report.style import Canvas, LeftOut, Picture, number

METRIC = "trust"
Matrices = Mapping[int, Frame]
"""By round, clients' weights: a row per client that mixes, a column per client that is mixed in."""


def trust(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Heat maps and lines for each label whose runs have trust weights."""
    found = [label for label, run in experiment.first if run.names(TRUST)]
    if not found:
        yield LeftOut("Trust weights", "no run uses a method with trust weights")
    for label in found:
        weights = trust_matrices([run for run in experiment.drawn[label] if run.names(METRIC)])
        yield _heat_maps(label, weights)
        if len(next(iter(weights.values()))) > 2:
            yield _others(label, weights)
        if len(weights) > 1:
            yield _evolution(label, weights)


def trust_matrices(runs: Sequence[ReportedRun]) -> Matrices:
    """The weights' means over seeds.

    A weight is NaN where a client set none in that round. After the last round's training clients
    mix once more; of that round, the last weights are taken.
    """
    each = [run.by_client(TRUST).groupby(["round", "client"]).tail(1) for run in runs]
    found: Frame = pd.concat(each).fillna(0.0)
    clients = sorted({*found.columns, *found.index.unique("client")})
    means = found.groupby(["round", "client"]).mean().reindex(columns=clients, fill_value=0.0)
    rounds = means.groupby("round")
    return {n: own.droplevel("round").reindex(clients).rename_axis(None) for n, own in rounds}


def _heat_maps(label: str, weights: Matrices) -> Picture:
    highest = max(_ends(weights)[1], 1e-9)
    round, last = list(weights.items())[-1]
    return Picture(
        f"trust-{path_part(label)}",
        f"Trust matrices of {label}",
        "Rows: the client that mixes. Columns: the client whose update is mixed in. Rows sum "
        "to 1. Mean over seeds.",
        f"Heat maps of trust weights between {listed(last)} at several rounds; the table "
        "shows the last round.",
        lambda canvas: _draw(canvas, weights, 0.0, highest),
        frame_table(f"Trust weights at round {round}", "client", last, ".3f"),
    )


def _others(label: str, weights: Matrices) -> Picture:
    """The same without the diagonal, and with colours from the lowest weight to the highest."""
    others = {n: own.mask(np.eye(len(own), dtype=bool)) for n, own in weights.items()}
    low, high = _ends(others)
    return Picture(
        f"trust-in-others-{path_part(label)}",
        f"Trust in others of {label}",
        f"The weights that clients give each other, without their own (PCL, figures 3, 4 and 8). "
        f"Colours span the lowest ({number(low)}) to the highest ({number(high)}).",
        f"Heat maps of trust weights between {listed(others[max(others)])} without the diagonal.",
        lambda canvas: _draw(canvas, others, low, max(high, low + 1e-9)),
    )


def _ends(weights: Matrices) -> tuple[float, float]:
    """The lowest weight and the highest."""
    every = pd.concat(weights)
    return float(every.min(axis=None)), float(every.max(axis=None))


def _draw(canvas: Canvas, weights: Matrices, low: float, high: float) -> Figure:
    """Matrices at up to four rounds, in colours from the palest (low) to the fullest (high)."""
    rounds = list(weights)
    matrices = {f"round {rounds[n]}": weights[rounds[n]] for n in evenly(len(rounds), 4)}
    return of_pairs(canvas, matrices, low, high, "trust weight")


def _evolution(label: str, weights: Matrices) -> Picture:
    every: Frame = pd.concat(weights)
    highest = _ends(weights)[1]

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            len(every.columns), 1.9, x="round", y="trust weight", sharex=True, sharey=True
        )
        for axis, client in zip(axes, every, strict=True):
            lines_by_client(canvas, axis, every.xs(client, level=1))
            axis.set_title(client)
            axis.set_ylim(0, 1.05 * highest)
        canvas.legend(figure, axes[0])
        return figure

    return Picture(
        f"trust-over-rounds-{path_part(label)}",
        f"Trust over rounds of {label}",
        "One panel per client: its weights for all clients, including itself. Mean over seeds.",
        f"Line plot of the weights for all clients by round, for each of {listed(every)}.",
        draw,
    )

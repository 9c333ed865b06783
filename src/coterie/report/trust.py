"""Whom each client trusts: its weights of the others' updates, and how they change (PCL)."""

from collections.abc import Iterator, Sequence

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


def trust(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Heat maps and lines for each label whose runs have trust weights."""
    found = [label for label, run in experiment.first if run.names(TRUST)]
    if not found:
        yield LeftOut("Trust weights", "no run uses a method with trust weights")
    for label in found:
        matrices = trust_matrices([run for run in experiment.drawn[label] if run.names(TRUST)])
        yield _heat_maps(label, *matrices)
        if len(matrices[0]) > 2:
            yield _others(label, *matrices)
        if len(matrices[1]) > 1:
            yield _evolution(label, *matrices)


def trust_matrices(runs: Sequence[ReportedRun]) -> tuple[list[str], list[int], np.ndarray]:
    """Clients, rounds and the mean over seeds of their weights, (rounds, client, peer).

    A weight is NaN where a client set none in that round. After the last round's training clients
    mix once more; of that round, the last weights are taken.
    """
    each = [run.by_client(TRUST).groupby(["round", "client"]).tail(1) for run in runs]
    found: Frame = pd.concat(each).fillna(0.0)
    clients = sorted({*found.columns, *found.index.unique("client")})
    rounds = sorted(found.index.unique("round"))
    means = found.groupby(["round", "client"]).mean().reindex(columns=clients, fill_value=0.0)
    weights = means.reindex(pd.MultiIndex.from_product([rounds, clients])).to_numpy()
    return clients, rounds, weights.reshape(len(rounds), len(clients), len(clients))


def _heat_maps(label: str, clients: list[str], rounds: list[int], weights: np.ndarray) -> Picture:
    highest = max(float(np.nanmax(weights)), 1e-9)
    last = pd.DataFrame(weights[-1], clients, clients)
    return Picture(
        f"trust-{path_part(label)}",
        f"Trust matrices of {label}",
        "Rows: the client that mixes. Columns: the client whose update is mixed in. Rows sum "
        "to 1. Mean over seeds.",
        f"Heat maps of trust weights between {listed(clients)} at several rounds; the table "
        "shows the last round.",
        lambda canvas: _draw(canvas, clients, rounds, weights, (0.0, highest)),
        frame_table(f"Trust weights at round {rounds[-1]}", "client", last, ".3f"),
    )


def _others(label: str, clients: list[str], rounds: list[int], weights: np.ndarray) -> Picture:
    """The same without the diagonal, and with colours from the lowest weight to the highest."""
    others = np.where(np.eye(len(clients), dtype=bool), np.nan, weights)
    lowest, highest = float(np.nanmin(others)), float(np.nanmax(others))
    ends = (lowest, max(highest, lowest + 1e-9))
    return Picture(
        f"trust-in-others-{path_part(label)}",
        f"Trust in others of {label}",
        f"The weights that clients give each other, without their own (PCL, figures 3, 4 and 8). "
        f"Colours span the lowest ({number(lowest)}) to the highest ({number(highest)}).",
        f"Heat maps of trust weights between {listed(clients)} without the diagonal.",
        lambda canvas: _draw(canvas, clients, rounds, others, ends),
    )


def _draw(
    canvas: Canvas,
    clients: list[str],
    rounds: list[int],
    weights: np.ndarray,
    ends: tuple[float, float],
) -> Figure:
    """Matrices at up to four rounds; ends: the weights of the palest and the fullest colour."""
    shown = evenly(len(rounds), 4)
    matrices = {f"round {rounds[n]}": pd.DataFrame(weights[n], clients, clients) for n in shown}
    return of_pairs(canvas, matrices, *ends, "trust weight")


def _evolution(label: str, clients: list[str], rounds: list[int], weights: np.ndarray) -> Picture:
    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            len(clients), 1.9, None, "round", "trust weight", sharex=True, sharey=True
        )
        for axis, client, own in zip(axes, clients, weights.swapaxes(0, 1), strict=True):
            lines_by_client(canvas, axis, pd.DataFrame(own, rounds, clients))
            axis.set_title(client)
            axis.set_ylim(0, 1.05 * float(np.nanmax(weights)))
        canvas.legend(figure, axes[0])
        return figure

    return Picture(
        f"trust-over-rounds-{path_part(label)}",
        f"Trust over rounds of {label}",
        "One panel per client: its weights for all clients, including itself. Mean over seeds.",
        f"Line plot of the weights for all clients by round, for each of {listed(clients)}.",
        draw,
    )

"""Who learnt from whom where a server and its clients teach each other (FedMKT).

In a round the server learns from its clients; they learn from what it sends when the round is over.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.analysis.experiments import SERVER, Experiment, ReportedRun
from coterie.analysis.tables import Table, listed
from coterie.files import path_part
from coterie.messages.names import TAUGHT
from coterie.report.plots import entry, evenly
from coterie.report.style import DASHES, Canvas, LeftOut, Picture

MOST = 10
"""Rounds that the table shows."""
Lesson = Mapping[str, Any]
"""What a side recorded of one time that it learnt: `samples` that it took over, `positions`, ..."""


@dataclass(frozen=True)
class Lessons:
    """What a run's sides recorded of learning from one another, by round (1 is the first)."""

    clients: Sequence[str]
    public: int | None
    """Public samples that there are, where the run recorded it."""
    server: Mapping[int, Lesson]
    """The server's, which have the samples of each client in `by`; empty if it only teaches."""
    learnt: Mapping[str, Mapping[int, Lesson]]
    """The clients'; without those that keep their figures to themselves."""

    @property
    def rounds(self) -> list[int]:
        """All in which anybody learnt."""
        return sorted({round for one in (self.server, *self.learnt.values()) for round in one})


def lessons(run: ReportedRun) -> Lessons:
    """Of a run; `after` counts the rounds that were over when a side learnt.

    A client that is scored learns as it will again at the start of the next round; the last counts.
    """
    server = {lesson["after"] + 1: lesson for lesson in run.by_round(TAUGHT).values()}
    learnt = {
        str(client): {lesson["after"]: lesson for lesson in found.to_dict("records")}
        for client, found in run.by_client(TAUGHT).groupby("client")
    }
    taught_by = {client for lesson in server.values() for client in lesson["by"]}
    public = run.server.get("samples", {}).get("train")  # a server trains on the public samples
    return Lessons(sorted({*taught_by, *learnt}), public, server, learnt)


def teaching(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """A figure for each label whose sides teach each other, of the run with the first seed."""
    every = {label: lessons(run) for label, run in experiment.first}
    found = [_picture(label, one) for label, one in every.items() if one.rounds]
    why = "no run uses a method with distillation between server and clients"
    yield from found or [LeftOut("Who learnt from whom", why)]


def _picture(label: str, one: Lessons) -> Picture:
    def draw(canvas: Canvas) -> Figure:
        shown = [d for d, there in ((_bars, one.server), (_lines, one.learnt)) if there]
        figure, axes = canvas.panels(
            len(shown), 2.5, (1, 2), "round", "public samples", sharex=True, sharey=True
        )
        for axis, draw_one in zip(axes, shown, strict=True):
            if one.public is not None:
                axis.axhline(one.public, color=canvas.theme.quiet, linestyle=DASHES[2])
            draw_one(axis, canvas, one)
            axis.set_ylim(bottom=0)
        canvas.legend(figure, axes[-1])
        return figure

    dotted = "" if one.public is None else f" Dotted line: all {one.public} public samples."
    return Picture(
        f"teaching-{path_part(label)}",
        f"Who learnt from whom, {label}",
        "Public samples on which a participant distilled another's predictions, because "
        "these had the lowest loss of all, its own included. In each round the server learns "
        f"from the clients, then the clients learn from the server.{dotted} First seed only.",
        f"Number of public samples on which the server learnt from {listed(one.clients)}, and "
        "they from the server, by round; the table lists the values.",
        draw,
        _table(one),
    )


def _bars(axis: Axes, canvas: Canvas, one: Lessons) -> None:
    """What the server took over, a bar per round, of pieces by client."""
    rounds = sorted(one.server)
    below = np.zeros(len(rounds))
    for n, client in enumerate(one.clients):
        counts = np.array([one.server[round]["by"].get(client, 0) for round in rounds])
        axis.bar(rounds, counts, 0.7, below, color=canvas.series(n)["color"], label=entry(client))
        below += counts
    axis.set_title("the server learns from clients")


def _lines(axis: Axes, canvas: Canvas, one: Lessons) -> None:
    """What each client took over from the server, a line per client."""
    for n, client in enumerate(one.clients):
        counts = {r: lesson["samples"] for r, lesson in sorted(one.learnt.get(client, {}).items())}
        axis.plot(list(counts), list(counts.values()), **canvas.series(n), label=entry(client))
    axis.set_title("clients learn from the server")


def _table(one: Lessons) -> Table:
    rows: list[list[str]] = []
    for at in (one.rounds[n] for n in evenly(len(one.rounds), MOST)):
        if at in one.server:
            given = [f"{client} {count}" for client, count in one.server[at]["by"].items()]
            rows.append([str(at), SERVER, ", ".join(given), *_quality(one.server[at])])
        for client in one.clients:
            if lesson := one.learnt.get(client, {}).get(at):
                rows.append([str(at), client, SERVER, *_quality(lesson)])
    of = "" if one.public is None else f", of {one.public}"
    return Table(
        "Public samples learnt from other participants",
        ["round", "learner", "from", f"samples{of}", "positions", "probability"],
        rows,
        "Positions: share of the answers' positions where the teacher has a position that "
        "has read the same text. Probability: mean probability the teacher gave to the "
        "transferred tokens at these positions. Other positions learn from the labels.",
    )


def _quality(lesson: Lesson) -> list[str]:
    """Samples, and how well their predictions came over."""
    if not lesson["samples"]:
        return ["0", "", ""]
    return [str(lesson["samples"]), *(f"{lesson[k]:.1%}" for k in ("positions", "mass"))]

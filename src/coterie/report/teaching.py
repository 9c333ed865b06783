"""Figure of distillation between a server and its clients, by teacher and learner (FedMKT).

In a round, the server first learns from the clients. The clients then learn from the server's
download.
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
from coterie.report.figures import ReportFigure
from coterie.report.plots import entry, evenly
from coterie.report.style import DASHES, SMALLEST_SEED, Canvas, LeftOut, Picture

TITLE = "Distillation between server and clients"
MOST = 10
"""The maximum number of rounds in the table."""
Lesson = Mapping[str, Any]
"""Statistics of one distillation, in which a client or the server learnt from a teacher.

`samples` is the number of samples on which the learner learnt from a teacher. `positions` is the
share of these samples' token positions that are aligned with a position in the teacher's tokens.
`mass` is the share of the teacher's probability mass that could be translated into the learner's
vocabulary, averaged over the aligned positions.
"""


@dataclass(frozen=True)
class Lessons:
    """The lessons of one run. A lesson contains the statistics of one distillation.

    There is one lesson for each learner and round. Rounds are counted from 1.
    """

    clients: Sequence[str]
    public: int | None
    """The number of public samples; None if the run did not record this number."""
    server: Mapping[int, Lesson]
    """The server's lesson in each round; empty if the server only teaches.

    Under `by`, a lesson contains the number of samples on which the server learnt from each client.
    """
    learnt: Mapping[str, Mapping[int, Lesson]]
    """For each client, the lesson in each round. Clients that share no metrics are absent."""

    @property
    def rounds(self) -> list[int]:
        """All rounds in which a client or the server learnt from a teacher."""
        learners = (self.server, *self.learnt.values())
        return sorted({round for records in learners for round in records})


def lessons(run: ReportedRun) -> Lessons:
    """Read the lessons of a run from the run's metrics.

    A recorded lesson's entry `after` is the number of rounds that were complete when the learner (a
    client or the server) learnt. A client may learn twice after the same round: before it is scored
    at the end of the round, and before it trains in the next round. Both lessons have the same
    `after`, and only the second lesson is returned.
    """
    server = {lesson["after"] + 1: lesson for lesson in run.by_round(TAUGHT).values()}
    learnt = {
        str(client): {lesson["after"]: lesson for lesson in records.to_dict("records")}
        for client, records in run.by_client(TAUGHT).groupby("client")
    }
    taught_by = {client for lesson in server.values() for client in lesson["by"]}
    public = run.server.get("samples", {}).get("train")  # the server trains on public samples
    return Lessons(sorted({*taught_by, *learnt}), public, server, learnt)


class Teaching(ReportFigure):
    """A figure of distillation for each label whose run recorded lessons.

    For each label (method and settings), only the run with the smallest seed is considered.
    """

    name = "teaching"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        by_label = {label: lessons(run) for label, run in experiment.first}
        pictures = [_picture(label, taught) for label, taught in by_label.items() if taught.rounds]
        reason = "no run recorded distillation between a server and its clients"
        yield from pictures or [LeftOut(TITLE, reason)]


def _picture(label: str, records: Lessons) -> Picture:
    def draw(canvas: Canvas) -> Figure:
        plots = [plot for plot, data in ((_bars, records.server), (_lines, records.learnt)) if data]
        figure, axes = canvas.panels(
            len(plots), 2.5, (1, 2), "round", "public samples", sharex=True, sharey=True
        )
        for axis, plot in zip(axes, plots, strict=True):
            if records.public is not None:
                axis.axhline(records.public, color=canvas.theme.quiet, linestyle=DASHES[2])
            plot(axis, canvas, records)
            axis.set_ylim(bottom=0)
        canvas.legend(figure, axes[-1])
        return figure

    public = records.public
    dotted = "" if public is None else f" Dotted line: all {public} public samples."
    return Picture(
        f"teaching-{path_part(label)}",
        f"{TITLE}, {label}",
        "Number of public samples on which a participant (a client or the server) learnt from "
        "another participant. On each sample, the teacher is the participant with the lowest loss, "
        "if this loss is lower than the learner's own loss. In each round, the server learns from "
        f"the clients, then the clients learn from the server.{dotted} {SMALLEST_SEED}",
        f"Numbers of public samples by round: bars for the server, which learns from "
        f"{listed(records.clients)}, and lines for the clients, which learn from the server. The "
        "table lists the values.",
        draw,
        _table(records),
    )


def _bars(axis: Axes, canvas: Canvas, records: Lessons) -> None:
    """Draw a stacked bar per round, with a segment per client.

    A segment shows the number of samples on which the server learnt from the client.
    """
    rounds = sorted(records.server)
    below = np.zeros(len(rounds))
    for n, client in enumerate(records.clients):
        counts = np.array([records.server[round]["by"].get(client, 0) for round in rounds])
        axis.bar(rounds, counts, 0.7, below, color=canvas.series(n)["color"], label=entry(client))
        below += counts
    axis.set_title("the server learns from clients")


def _lines(axis: Axes, canvas: Canvas, records: Lessons) -> None:
    """Draw a line per client.

    A line shows the number of samples on which the client learnt from the server.
    """
    for n, client in enumerate(records.clients):
        by_round = sorted(records.learnt.get(client, {}).items())
        counts = {round: lesson["samples"] for round, lesson in by_round}
        axis.plot(list(counts), list(counts.values()), **canvas.series(n), label=entry(client))
    axis.set_title("clients learn from the server")


def _table(records: Lessons) -> Table:
    rows: list[list[str]] = []
    for round in (records.rounds[n] for n in evenly(len(records.rounds), MOST)):
        if round in records.server:
            lesson = records.server[round]
            teachers = [f"{client} {count}" for client, count in lesson["by"].items()]
            rows.append([str(round), SERVER, ", ".join(teachers), *_quality(lesson)])
        for client in records.clients:
            if lesson := records.learnt.get(client, {}).get(round):
                rows.append([str(round), client, SERVER, *_quality(lesson)])
    total = "" if records.public is None else f" (of {records.public})"
    return Table(
        "Public samples on which participants learnt from other participants",
        ["round", "learner", "teacher", f"samples{total}", "positions", "probability"],
        rows,
        "Samples: number of public samples on which the learner learnt from a teacher. Positions: "
        "share of the token positions in the answers of these samples that are aligned with one of "
        "the teacher's token positions; at all other positions, the learner learns from the "
        "correct answer. Probability: share of the teacher's probability mass that could be "
        "translated into the learner's vocabulary, averaged over the aligned positions.",
    )


def _quality(lesson: Lesson) -> list[str]:
    """Return the cells of a table that show a lesson's statistics.

    Returns:
        The number of samples, the share of aligned token positions, and the share of the teacher's
        probability mass that could be mapped to tokens of the learner's vocabulary. The shares are
        empty if there are no samples.
    """
    if not lesson["samples"]:
        return ["0", "", ""]
    return [str(lesson["samples"]), *(f"{lesson[k]:.1%}" for k in ("positions", "mass"))]

"""Figure of the norm of each client's change, divided by the median of these norms in the round.

A client's change is the difference between the client's upload and the preceding download.
"""

from collections.abc import Iterator, Mapping

import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Frame
from coterie.analysis.tables import Table, listed
from coterie.messages.names import CHANGE, LEFT_OUT
from coterie.report.figures import ReportFigure
from coterie.report.plots import entry, plain_log
from coterie.report.style import SMALLEST_SEED, Canvas, LeftOut, Picture, looks, number

TITLE = "Size of clients' changes"


class Uploads(ReportFigure):
    """A figure of the norm of each client's change in each round.

    A change is the difference between an upload and the preceding download. Each norm is divided by
    the median norm of all clients' changes in the same round. The figure has a panel per label
    (method and settings) and a line per client. Crosses mark uploads that were excluded from a
    round.
    """

    name = "uploads"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        runs = {label: run for label, run in experiment.first if run.names(CHANGE)}
        if runs:
            yield _ratios(runs)
        else:
            reason = "no run recorded the differences between uploads and the preceding downloads"
            yield LeftOut(TITLE, reason)


def _changes(run: ReportedRun) -> Frame:
    """Return statistics of a run's uploads.

    Returns:
        A frame with a row per client and round. A change is the difference between an upload and
        the preceding download. Column `ratio` contains the norm of the client's change, divided by
        the median norm of the round. Column `cosine` contains the cosine similarity between the
        client's change and the sum of the other clients' normalised changes. Column `excluded`
        tells whether the upload was excluded from the round.
    """
    rows = run.metrics[run.metrics["name"] == LEFT_OUT]
    excluded = pd.MultiIndex.from_frame(rows[["client", "round"]])
    changes = run.by_client(CHANGE).groupby(["client", "round"]).last().astype(float)
    # The upload of a client that diverged is excluded without being measured.
    changes = changes.reindex(changes.index.union(excluded))
    return changes.assign(excluded=changes.index.isin(excluded))


def _ratios(runs: Mapping[str, ReportedRun]) -> Picture:
    changes = {label: _changes(run) for label, run in runs.items()}
    clients = sorted({name for frame in changes.values() for name in frame.index.unique("client")})
    styles = looks(clients)

    def draw(canvas: Canvas) -> Figure:
        axis_label = "change relative to the median"
        figure, axes = canvas.panels(len(changes), 2.1, (1, 3), "round", axis_label, sharey=True)
        for axis, (label, frame) in zip(axes, changes.items(), strict=True):
            for client in frame.index.unique("client"):
                uploads, colour = frame.loc[client], canvas.colour(styles[client])
                marks = {"marker": styles[client].marker, "linestyle": styles[client].dash}
                axis.plot(
                    uploads.index, uploads["ratio"], color=colour, label=entry(client), **marks
                )
                excluded = uploads[uploads["excluded"]]
                x, y = excluded.index, excluded["ratio"]
                axis.plot(x, y, "x", color=canvas.theme.ink, ms=9, mew=1.8)
            axis.set_title(label)
            axis.set_yscale("log", nonpositive="mask")
        plain_log(axes[0].yaxis)
        canvas.legend(figure, axes[0])
        return figure

    rows: list[list[str]] = []
    for label, frame in changes.items():
        for client, uploads in frame.groupby("client"):
            ratios, cosines = uploads["ratio"].dropna(), uploads["cosine"].dropna()
            largest = number(ratios.max()) if len(ratios) else ""
            lowest = f"{cosines.min():.2f}" if len(cosines) else ""
            excluded = uploads.index.unique("round")[uploads["excluded"]]
            rows.append([label, client, largest, lowest, ", ".join(map(str, excluded))])
    return Picture(
        "uploads",
        TITLE,
        "Norm of the difference between each upload and the preceding download, divided by the "
        "median of these norms in the same round; logarithmic scale. Crosses: uploads excluded "
        "from the round. "
        f"{SMALLEST_SEED}",
        f"Line plot with a panel for each of {listed(changes)} and a line for each client: the "
        "norm of the client's change in each round, divided by the median norm of the round. The "
        "table lists each client's largest value, and the rounds from which the client's upload "
        "was excluded.",
        draw,
        Table(
            "Largest change of each client, as a multiple of the round's median",
            ["method", "client", "largest change", "lowest cosine", "excluded in rounds"],
            rows,
            "Change: difference between an upload and the preceding download. Cosine: cosine "
            "similarity between the client's change and the sum of the other clients' normalised "
            "changes.",
        ),
    )

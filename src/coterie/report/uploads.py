"""How far each client's upload moved from its download, relative to the round's median."""

from collections.abc import Iterator, Mapping

import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import Experiment, ReportedRun
from coterie.analysis.frame import Frame
from coterie.analysis.tables import Table, listed
from coterie.messages.names import CHANGE, LEFT_OUT
from coterie.report.plots import entry, plain_log
from coterie.report.style import Canvas, LeftOut, Picture, looks, number

TITLE = "Size of uploads"


def uploads(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """Yield a panel per label, with a line of ratios per client; excluded uploads are crossed."""
    runs = {label: run for label, run in experiment.first if run.names(CHANGE)}
    if runs:
        yield _ratios(runs)
    else:
        yield LeftOut(TITLE, "no run recorded the change of each upload")


def _changes(run: ReportedRun) -> Frame:
    """Return `ratio`, `cosine` and `excluded` of each upload, a row per client and round."""
    rows = run.metrics[run.metrics["name"] == LEFT_OUT]
    excluded = pd.MultiIndex.from_frame(rows[["client", "round"]])
    found = run.by_client(CHANGE).groupby(["client", "round"]).last().astype(float)
    found = found.reindex(found.index.union(excluded))  # a client that diverged has no figures
    return found.assign(excluded=found.index.isin(excluded))


def _ratios(runs: Mapping[str, ReportedRun]) -> Picture:
    changes = {label: _changes(run) for label, run in runs.items()}
    clients = sorted({name for found in changes.values() for name in found.index.unique("client")})
    look = looks(clients)

    def draw(canvas: Canvas) -> Figure:
        y = "change relative to the median"
        figure, axes = canvas.panels(len(changes), 2.1, (1, 3), "round", y, sharey=True)
        for axis, (label, found) in zip(axes, changes.items(), strict=True):
            for client in found.index.unique("client"):
                own, colour = found.loc[client], canvas.colour(look[client])
                marks = {"marker": look[client].marker, "linestyle": look[client].dash}
                axis.plot(own.index, own["ratio"], color=colour, label=entry(client), **marks)
                out = own[own["excluded"]]
                axis.plot(out.index, out["ratio"], "x", color=canvas.theme.ink, ms=9, mew=1.8)
            axis.set_title(label)
            axis.set_yscale("log", nonpositive="mask")
        plain_log(axes[0].yaxis)
        canvas.legend(figure, axes[0])
        return figure

    rows = [
        [
            label,
            client,
            "" if own["ratio"].isna().all() else number(own["ratio"].max()),
            "" if own["cosine"].isna().all() else f"{own['cosine'].min():.2f}",
            ", ".join(map(str, own.index.unique("round")[own["excluded"]])),
        ]
        for label, found in changes.items()
        for client, own in found.groupby("client")
    ]
    return Picture(
        "uploads",
        TITLE,
        "Norm of the difference between each upload and the preceding download, as a multiple of "
        "the round's median; logarithmic scale. Crosses: uploads excluded from the round. From "
        "the run with the smallest seed.",
        f"Line plot of the relative size of each client's upload by round for {listed(changes)}; "
        "the table lists each client's largest ratio and the rounds that excluded its upload.",
        draw,
        Table(
            "Largest change of each client, as a multiple of the round's median",
            ["method", "client", "largest ratio", "lowest cosine", "excluded in rounds"],
            rows,
            "Cosine: between an upload's change and the sum of the other clients' changes.",
        ),
    )

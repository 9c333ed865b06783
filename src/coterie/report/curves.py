"""Scores over rounds or at the end, and training loss over steps."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import MEAN, SERVER, Experiment, ReportedRun
from coterie.analysis.frame import Column, Frame
from coterie.analysis.tables import Table, frame_table, listed
from coterie.messages.names import LOSS
from coterie.report.plots import SPREAD, entry, evenly, over_rounds, plain_log, scale_of
from coterie.report.style import Canvas, LeftOut, Picture, looks, number

MOST = 12
"""Lines that one panel can hold and still be read."""


def curves(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """What the runs of an experiment allow of these figures."""
    best = _best(experiment)
    if not best:
        yield LeftOut(_title(experiment), "no run has been evaluated yet")
    elif experiment.series[MEAN].groupby(["label", "run"]).count().max() > 1:
        scored = experiment.series.index.unique("label")  # not of a run without metrics
        yield _over_rounds(experiment, [label for label in best if label in scored])
    else:
        yield _final(experiment, best)
    levels = dict.fromkeys(name for run in experiment.all for name in run.names(LOSS))
    if levels:
        yield _losses(experiment, list(levels))
    else:
        yield LeftOut("Training loss", "no run has trained yet")


LAST = (
    " The last point is the score after the last round. The summary table lists the scores of the "
    "kept models, which may be of earlier rounds."
)


def keeps(experiment: Experiment) -> bool:
    """Return whether a finished run's scores are those of kept models."""
    return any(run.result and run.result.get("kept") for run in experiment.all)


def _title(experiment: Experiment) -> str:
    return f"{experiment.split.capitalize()} {experiment.metric.label}"


def _last(experiment: Experiment) -> Frame:
    """Return the headline scores: a row per label and run, columns as of the series.

    A finished run has the scores of its result, which are its kept models' where models are kept.
    """
    last = experiment.series.groupby(["label", "run"], sort=False).last()
    for label, runs in experiment.drawn.items():
        for seed, run in enumerate(runs):
            for column, score in run.headline(experiment.metric).items():
                last.loc[(label, seed), column] = score
    return last


def _best(experiment: Experiment) -> list[str]:
    """Labels that have scores, at most MOST: those with the best last mean; in table order."""
    means = _last(experiment)[MEAN].groupby("label", sort=False).mean().dropna()
    kept = means.map(experiment.metric.order).nsmallest(MOST).index
    return [label for label in means.index if label in kept]


def _some(experiment: Experiment, best: list[str]) -> str:
    left = len(experiment.runs) - len(best)
    return f" Only the {len(best)} best of {len(experiment.runs)} are shown." if left > 0 else ""


def _panels(experiment: Experiment, best: list[str]) -> list[str]:
    """The mean, every client, and the server if it has a model of its own that was scored."""
    found = _last(experiment).loc[best].dropna(axis=1, how="all").columns
    return [MEAN, *dict.fromkeys([*experiment.clients, *found.intersection([SERVER])])]


def _over_rounds(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    look, what = looks(list(experiment.runs)), metric.label
    figures = experiment.series.groupby(["label", "round"]).agg(["mean", "std"])

    def draw(canvas: Canvas) -> Figure:
        y = f"{experiment.split} {what}"
        return over_rounds(canvas, figures, best, panels, look, metric, y)

    return Picture(
        metric.key,
        f"{_title(experiment)} over rounds",
        f"Each model on its own {experiment.split} text after every evaluated round, at the "
        f"point where the method reports its results{scale_of(metric)}. {SPREAD} "
        f"{metric.better}{_some(experiment, best)}{LAST if keeps(experiment) else ''}",
        f"Line plot of {what} by round for {listed(best)}, with one panel for the mean and "
        f"one for each of {listed(panels[1:])}. The table lists the mean over clients by round."
        f"{LAST if keeps(experiment) else ''}",
        draw,
        _rounds_table(experiment),
    )


def _rounds_table(experiment: Experiment) -> Table:
    found = experiment.series[MEAN].dropna().groupby(["label", "round"]).mean().unstack("round")
    means = found.loc[[label for label in experiment.runs if label in found.index]]
    means = means.iloc[:, evenly(len(means.columns), 10)]
    unit = " (%)" if experiment.metric.share else ""
    return frame_table(f"Mean over clients by round{unit}", "method", means, ".2f")


def _final(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    look, what = looks(list(experiment.runs)), metric.label
    figures = _last(experiment).groupby("label").agg(["mean", "std"])
    end = "of the kept models" if keeps(experiment) else "after the last round"

    def draw(canvas: Canvas) -> Figure:
        across = 2 if canvas.narrow else min(len(panels), 5)
        height = 0.25 * len(best) + 0.55
        figure, axes = canvas.panels(len(panels), height, across, what, sharey=True)
        for axis, panel in zip(axes, panels, strict=True):
            for place, label in enumerate(best):
                mean, spread = figures[panel].loc[label]
                if np.isnan(mean):
                    continue  # a method without a server's model beside one with it
                colour = canvas.colour(look[label])
                axis.errorbar(
                    mean, place, xerr=np.nan_to_num(spread), color=colour, fmt=look[label].marker,
                    markersize=7, elinewidth=1.6, capsize=2.5,
                )  # fmt: skip
            axis.set_title(panel)
            axis.set_yticks(range(len(best)), best)
            axis.margins(x=0.12, y=0.12)
            if not metric.share:
                axis.set_xscale("log")
                plain_log(axis.xaxis)
        axes[0].invert_yaxis()
        return figure

    return Picture(
        metric.key,
        f"{_title(experiment)} {end}",
        f"Each model on its own {experiment.split} text, at the point where the method "
        f"reports its results{scale_of(metric)}. {SPREAD} "
        f"{metric.better}{_some(experiment, best)}",
        f"Dot plot of {what} {end} for {listed(best)}, with one panel for the mean and one "
        f"for each of {listed(panels[1:])}. The summary table lists the values.",
        draw,
    )


def _steps(run: ReportedRun, level: str) -> Column:
    """Mean loss over clients by the number of the update (1 is the first)."""
    found = run.by_client(level).reindex(columns=[0])
    found["update"] = found.groupby("client").cumcount() + 1
    losses = found.reset_index().pivot(index="update", columns="client", values=0)
    return losses.mean(axis=1, skipna=False).dropna()


def smooth(values: Column, width: int) -> Column:
    """A running mean of `width` values, of fewer at the ends."""
    width = max(1, min(width, len(values)))
    return values.rolling(width, center=True, min_periods=1).mean()


def _losses(experiment: Experiment, levels: list[str]) -> Picture:
    look = looks(list(experiment.runs))
    trained = [
        label for label, runs in experiment.drawn.items() if any(r.names(LOSS) for r in runs)
    ]
    shown = [label for label in trained if label in _best(experiment)] or trained[:MOST]
    steps = {
        (label, level): pd.concat([_steps(run, level) for run in runs], axis=1).mean(axis=1)
        for label, runs in experiment.drawn.items()
        for level in levels
    }

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            len(levels),
            2.6,
            1 if canvas.narrow else 3,
            "update",
            "loss (nats per token)",
            sharey=True,
        )
        for axis, level in zip(axes, levels, strict=True):
            for label in shown:
                mean = steps[label, level]
                width = experiment.drawn[label][0].config["training"]["steps"]
                thin = slice(None, None, max(1, len(mean) // 300))
                x, colour = mean.index[thin], canvas.colour(look[label])
                axis.plot(x, mean.iloc[thin], color=colour, alpha=0.25, linewidth=0.7)
                line = smooth(mean, width).iloc[thin]
                axis.plot(x, line, color=colour, linestyle=look[label].dash, label=entry(label))
            axis.set_title(level.removeprefix(LOSS))
        canvas.legend(figure, axes[0])
        return figure

    names = [level.removeprefix(LOSS) for level in levels]
    rows = [
        [
            label,
            level.removeprefix(LOSS),
            number(len(mean)),
            *(f"{mean.iloc[n]:.3f}" for n in (0, -1)),
        ]
        for (label, level), mean in steps.items()
        if len(mean)
    ]
    return Picture(
        "loss",
        "Training loss by update",
        "Batch loss before each update, mean over clients and seeds, with one panel per "
        "level of the schedule (router levels may use validation text). Bold: running mean "
        "over one round's steps."
        f"{_some(experiment, shown) if len(shown) < len(trained) else ''}",
        f"Line plot of loss by update at {listed(names)} for {listed(shown)}.",
        draw,
        Table("Loss, mean over clients", ["method", "level", "updates", "first", "last"], rows),
    )

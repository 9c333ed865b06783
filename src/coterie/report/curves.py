"""Scores over rounds or at the end, training loss over steps, and scores by router schedule.

The last one is how scores depend on when routers are trained, and for how long (CoMiGS, figure 7).
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from coterie.analysis.experiments import MEAN, SERVER, Experiment, ReportedRun
from coterie.analysis.frame import Column, Frame, mean_score
from coterie.analysis.tables import Table, frame_table, listed
from coterie.files import path_part
from coterie.messages.names import LOSS
from coterie.report.plots import SPREAD, entry, evenly, heat_map, over_rounds, scale, scale_of
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
    return any(result.get("kept") for found in experiment.finished.values() for result in found)


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
    look, last = looks(list(experiment.runs)), LAST if keeps(experiment) else ""
    figures = experiment.series.groupby(["label", "round"]).agg(["mean", "std"])
    y, unit = f"{experiment.split} {metric.label}", " (%)" if metric.share else ""
    means = experiment.series[MEAN].dropna().groupby(["label", "round"]).mean().unstack("round")
    means = means.loc[[label for label in experiment.runs if label in means.index]]
    means = means.iloc[:, evenly(len(means.columns), 10)]

    return Picture(
        metric.name,
        f"{_title(experiment)} over rounds",
        f"Each model on its own {experiment.split} text after every evaluated round, at the "
        f"point where the method reports its results{scale_of(metric)}. {SPREAD} "
        f"{metric.better}{_some(experiment, best)}{last}",
        f"Line plot of {metric.label} by round for {listed(best)}, with one panel for the mean and "
        f"one for each of {listed(panels[1:])}. The table lists the mean over clients by round."
        f"{last}",
        lambda canvas: over_rounds(canvas, figures, best, panels, look, metric, y),
        frame_table(f"Mean over clients by round{unit}", "method", means, ".2f"),
    )


def _final(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    look, what = looks(list(experiment.runs)), metric.label
    figures = _last(experiment).groupby("label").agg(["mean", "std"])
    end = "of the kept models" if keeps(experiment) else "after the last round"

    def draw(canvas: Canvas) -> Figure:
        height = 0.25 * len(best) + 0.55
        figure, axes = canvas.panels(len(panels), height, (2, 5), what, sharey=True)
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
            scale(axis, "x", metric)
        axes[0].invert_yaxis()
        return figure

    return Picture(
        metric.name,
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
    names = [level.removeprefix(LOSS) for level in levels]
    steps = {
        (label, name): pd.concat([_steps(run, level) for run in runs], axis=1).mean(axis=1)
        for label, runs in experiment.drawn.items()
        for level, name in zip(levels, names, strict=True)
    }
    trained = [n for n, runs in experiment.drawn.items() if any(r.names(LOSS) for r in runs)]
    shown = [label for label in trained if label in _best(experiment)] or trained[:MOST]

    def draw(canvas: Canvas) -> Figure:
        y = "loss (nats per token)"
        figure, axes = canvas.panels(len(levels), 2.6, (1, 3), "update", y, sharey=True)
        for axis, name in zip(axes, names, strict=True):
            for label in shown:
                mean = steps[label, name]
                width = experiment.drawn[label][0].config["training"]["steps"]
                thin = slice(None, None, max(1, len(mean) // 300))
                x, colour = mean.index[thin], canvas.colour(look[label])
                axis.plot(x, mean.iloc[thin], color=colour, alpha=0.25, linewidth=0.7)
                line = smooth(mean, width).iloc[thin]
                axis.plot(x, line, color=colour, linestyle=look[label].dash, label=entry(label))
            axis.set_title(name)
        canvas.legend(figure, axes[0])
        return figure

    rows = [
        [*names, number(len(mean)), *(f"{mean.iloc[n]:.3f}" for n in (0, -1))]
        for names, mean in steps.items()
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


def sweep(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """A heat map per method whose finished runs differ in `router.every` or `router.steps`."""
    found, metric = [], experiment.metric
    for run in experiment.all:
        router = run.config["method"].get("router") or {}
        if run.result is not None and {"every", "steps"} <= router.keys():
            score = metric.shown(mean_score([run.result], metric.name))
            found.append((run.method, router["every"], router["steps"], score))
    runs = pd.DataFrame(found, columns=["method", "every", "steps", "score"])
    methods = runs.groupby("method", sort=False)
    means = {method: rows.pivot_table("score", "steps", "every") for method, rows in methods}
    swept = {method: cells for method, cells in means.items() if cells.size > 1}
    if not swept:
        why = "no finished runs of the same method differ in router.every or router.steps"
        yield LeftOut("Router schedule", why)
    for method, cells in swept.items():
        yield _heat_map(experiment, str(method), cells)


def _heat_map(experiment: Experiment, method: str, cells: Frame) -> Picture:
    """cells: mean scores, a row per `router.steps`, a column per `router.every`."""
    metric, (steps, every) = experiment.metric, cells.shape

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(0.45 * steps + 1.3)
        named = cells.rename_axis(
            index="router.steps: updates per phase",
            columns="router.every: steps between router phases",
        )
        heat_map(canvas, figure, figure.subplots(), named, f"mean {metric.label}")
        return figure

    return Picture(
        f"router-schedule-{path_part(method)}",
        f"Router schedule of {method}",
        f"Mean {experiment.split} {metric.label} over clients, seeds and all other "
        f"differences between the runs. {metric.better}",
        f"Heat map of {steps} by {every} router schedules; {metric.label} ranges from "
        f"{number(cells.min(axis=None))} to {number(cells.max(axis=None))}. The table lists all "
        "values.",
        draw,
        frame_table(f"Mean {metric.label}", "router.steps \\ router.every", cells, ".2f"),
    )

"""Figures of scores over rounds, final scores, training loss, and scores by router schedule.

The figure of router schedules shows how scores depend on how often and for how many steps routers
are trained (CoMiGS, figure 7).
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
from coterie.report.figures import ReportFigure
from coterie.report.plots import SPREAD, entry, evenly, heat_map, over_rounds, scale, scale_of
from coterie.report.style import Canvas, LeftOut, Picture, looks, number

MOST = 12
"""The maximum number of lines that are legible in one panel."""


class Curves(ReportFigure):
    """Figures of scores and training loss."""

    name = "curves"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        best = _best(experiment)
        if not best:
            yield LeftOut(_title(experiment), "no run has been evaluated yet")
        elif experiment.series[MEAN].groupby(["label", "run"]).count().max() > 1:
            scored = experiment.series.index.unique("label")  # a run without metrics has no series
            yield _over_rounds(experiment, [label for label in best if label in scored])
        else:
            yield _final(experiment, best)
        levels = dict.fromkeys(name for run in experiment.all for name in run.names(LOSS))
        if levels:
            yield _losses(experiment, list(levels))
        else:
            yield LeftOut("Training loss", "no run has trained yet")


POINT = "measured after local training or after aggregation, depending on the method"
LAST = (
    " The last point is the score after the last round. The summary table lists the scores of the "
    "kept models, which may be from earlier rounds."
)


def keeps(experiment: Experiment) -> bool:
    """Return whether clients of any finished run kept their best models.

    The scores of these models are reported, although they may be from earlier rounds.
    """
    return any(result.get("kept") for runs in experiment.finished.values() for result in runs)


def _title(experiment: Experiment) -> str:
    return f"{experiment.split.capitalize()} {experiment.metric.label}"


def _last(experiment: Experiment) -> Frame:
    """Return a frame of the final scores, with a row per label (method and settings) and run.

    The columns are the same as in `Experiment.series`. The final scores of a finished run are the
    scores in the run's result. If clients keep their best models, these are the scores of the kept
    models. The final scores of an unfinished run are the run's latest scores.
    """
    last = experiment.series.groupby(["label", "run"], sort=False).last()
    for label, runs in experiment.drawn.items():
        for seed, run in enumerate(runs):
            for column, score in run.headline(experiment.metric).items():
                last.loc[(label, seed), column] = score
    return last


def _best(experiment: Experiment) -> list[str]:
    """Return the labels whose mean final scores are best, in the order of the summary table.

    A label is a method with its settings. At most `MOST` labels are returned.
    """
    means = _last(experiment)[MEAN].groupby("label", sort=False).mean().dropna()
    selected = means.map(experiment.metric.order).nsmallest(MOST).index
    return [label for label in means.index if label in selected]


def _selection(experiment: Experiment, best: list[str]) -> str:
    total = len(experiment.runs)
    sentence = (
        f" Only the best {len(best)} of {total} combinations of a method and its settings are "
        "shown."
    )
    return sentence if len(best) < total else ""


def _panels(experiment: Experiment, best: list[str]) -> list[str]:
    """Return the names of the panels: the mean, every client, and the server if it was scored."""
    columns = _last(experiment).loc[best].dropna(axis=1, how="all").columns
    return [MEAN, *dict.fromkeys([*experiment.clients, *columns.intersection([SERVER])])]


def _over_rounds(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    styles, last = looks(list(experiment.runs)), LAST if keeps(experiment) else ""
    figures = experiment.series.groupby(["label", "round"]).agg(["mean", "std"])
    y, unit = f"{experiment.split} {metric.label}", " (%)" if metric.share else ""
    means = experiment.series[MEAN].dropna().groupby(["label", "round"]).mean().unstack("round")
    means = means.loc[[label for label in experiment.runs if label in means.index]]
    means = means.iloc[:, evenly(len(means.columns), 10)]

    return Picture(
        metric.name,
        f"{_title(experiment)} over rounds",
        f"Score of each client's model on its own {experiment.split} text in every evaluated "
        f"round, {POINT}{scale_of(metric)}. {SPREAD} "
        f"{metric.better}{_selection(experiment, best)}{last}",
        f"Line plot of {metric.label} by round for {listed(best)}, with one panel for the mean and "
        f"one for each of {listed(panels[1:])}. The table lists the mean over clients by round."
        f"{last}",
        lambda canvas: over_rounds(canvas, figures, best, panels, styles, metric, y),
        frame_table(f"Mean over clients by round{unit}", "method", means, ".2f"),
    )


def _final(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    styles, label = looks(list(experiment.runs)), metric.label
    figures = _last(experiment).groupby("label").agg(["mean", "std"])
    end = "of the kept models" if keeps(experiment) else "after the last round"

    def draw(canvas: Canvas) -> Figure:
        height = 0.25 * len(best) + 0.55
        figure, axes = canvas.panels(len(panels), height, (2, 5), label, sharey=True)
        for axis, panel in zip(axes, panels, strict=True):
            for row, name in enumerate(best):
                mean, spread = figures[panel].loc[name]
                if np.isnan(mean):
                    continue  # the server has a model in some of the methods only
                colour = canvas.colour(styles[name])
                axis.errorbar(
                    mean, row, xerr=np.nan_to_num(spread), color=colour, fmt=styles[name].marker,
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
        f"Score of each client's model on its own {experiment.split} text, {POINT}"
        f"{scale_of(metric)}. {SPREAD} {metric.better}{_selection(experiment, best)}",
        f"Dot plot of {label} {end} for {listed(best)}, with one panel for the mean and one "
        f"for each of {listed(panels[1:])}. The summary table lists the values.",
        draw,
    )


def _steps(run: ReportedRun, level: str) -> Column:
    """Return the training loss at each optimiser step of one level, averaged over clients.

    A level is a group of parameters that are trained together on a schedule.

    Args:
        run: The run.
        level: The level, given as the name of the metric that contains its training loss. This name
            is LOSS, followed by the name of the level.

    Returns:
        A series, indexed by the number of the optimiser step (counted from 1).
    """
    frame = run.by_client(level).reindex(columns=[0])
    frame["update"] = frame.groupby("client").cumcount() + 1
    losses = frame.reset_index().pivot(index="update", columns="client", values=0)
    return losses.mean(axis=1, skipna=False).dropna()


def smooth(values: Column, width: int) -> Column:
    """Return the running mean over `width` values, or over fewer values near both ends."""
    width = max(1, min(width, len(values)))
    return values.rolling(width, center=True, min_periods=1).mean()


def _losses(experiment: Experiment, levels: list[str]) -> Picture:
    styles = looks(list(experiment.runs))
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
                x, colour = mean.index[thin], canvas.colour(styles[label])
                axis.plot(x, mean.iloc[thin], color=colour, alpha=0.25, linewidth=0.7)
                line = smooth(mean, width).iloc[thin]
                axis.plot(x, line, color=colour, linestyle=styles[label].dash, label=entry(label))
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
        "Training loss of each batch, computed before the update; mean over clients and seeds. "
        "Parameters that are trained together form a level of the schedule; there is one panel for "
        "each level. A level that trains routers may use validation text. Thick lines: "
        "running mean over as many updates as a round has training steps."
        f"{_selection(experiment, shown) if len(shown) < len(trained) else ''}",
        f"Line plot of training loss by update for {listed(shown)}, with one panel for each "
        f"level of the schedule ({listed(names)}). The table lists the first and last values.",
        draw,
        Table("Loss, mean over clients", ["method", "level", "updates", "first", "last"], rows),
    )


class Sweep(ReportFigure):
    """A heat map for each method whose finished runs differ in the routers' schedule.

    The schedule says how often, and for how many updates at a time, routers are trained.
    """

    name = "sweep"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        records, metric = [], experiment.metric
        for run in experiment.all:
            router = run.config["method"].get("router") or {}
            if run.result is not None and {"every", "steps"} <= router.keys():
                score = metric.shown(mean_score([run.result], metric.name))
                records.append((run.method, router["every"], router["steps"], score))
        runs = pd.DataFrame(records, columns=["method", "every", "steps", "score"])
        methods = runs.groupby("method", sort=False)
        means = {method: rows.pivot_table("score", "steps", "every") for method, rows in methods}
        swept = {method: cells for method, cells in means.items() if cells.size > 1}
        if not swept:
            reason = "no finished runs of the same method differ in router.every or router.steps"
            yield LeftOut("Router schedule", reason)
        for method, cells in swept.items():
            yield _heat_map(experiment, str(method), cells)


def _heat_map(experiment: Experiment, method: str, cells: Frame) -> Picture:
    """Return a heat map of mean scores.

    Args:
        experiment: The experiment.
        method: The name of the method.
        cells: Mean scores, with a row per value of `router.steps` and a column per value of
            `router.every`.
    """
    metric, (steps, every) = experiment.metric, cells.shape

    def draw(canvas: Canvas) -> Figure:
        figure = canvas.figure(0.45 * steps + 1.3)
        labelled = cells.rename_axis(
            index="router.steps: updates per phase",
            columns="router.every: steps between router phases",
        )
        heat_map(canvas, figure, figure.subplots(), labelled, f"mean {metric.label}")
        return figure

    return Picture(
        f"router-schedule-{path_part(method)}",
        f"Router schedule of {method}",
        f"Mean {experiment.split} {metric.label} over clients, seeds and all other settings in "
        f"which the runs differ. {metric.better}",
        f"Heat map of {steps} by {every} router schedules; {metric.label} ranges from "
        f"{number(cells.min(axis=None))} to {number(cells.max(axis=None))}. The table lists all "
        "values.",
        draw,
        frame_table(f"Mean {metric.label}", "router.steps \\ router.every", cells, ".2f"),
    )

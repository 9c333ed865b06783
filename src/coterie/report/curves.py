"""Scores over rounds or at the end, and training loss over steps."""

from collections.abc import Iterator

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from coterie.methods.contract import SERVER
from coterie.report.experiments import (
    Experiment,
    ReportedRun,
    Series,
    mean_series,
    over_seeds,
)
from coterie.report.style import Canvas, LeftOut, Picture, listed, looks, number
from coterie.results.tables import Table
from coterie.scoring.metrics import Metric

MOST = 12
"""Lines that one panel can hold and still be read."""
SPREAD = "Bands and bars: one standard deviation over seeds."


def curves(experiment: Experiment) -> Iterator[Picture | LeftOut]:
    """What the runs of an experiment allow of these figures."""
    best = _best(experiment)
    if not best:
        yield LeftOut(_title(experiment), "no run has been evaluated yet")
    elif any(len(_mean(run, experiment.metric)) > 1 for run in experiment.all):
        yield _over_rounds(experiment, best)
    else:
        yield _final(experiment, best)
    levels = dict.fromkeys(name for run in experiment.all for name in run.names("loss/"))
    if levels:
        yield _losses(experiment, list(levels))
    else:
        yield LeftOut("Training loss", "no run has trained yet")


def _title(experiment: Experiment) -> str:
    return f"{experiment.split.capitalize()} {experiment.metric.label}"


def _mean(run: ReportedRun, metric: Metric) -> Series:
    return mean_series(run.series(metric).values())


def _best(experiment: Experiment) -> list[str]:
    """Labels that have scores, at most MOST: those with the best last mean; in table order."""
    means = {
        label: [mean for run in runs if (mean := _mean(run, experiment.metric))]
        for label, runs in experiment.drawn.items()
    }
    last = {
        label: experiment.metric.order(float(np.mean([mean[max(mean)] for mean in found])))
        for label, found in means.items()
        if found
    }
    kept = sorted(last, key=lambda label: last[label])[:MOST]
    return [label for label in last if label in kept]


def _some(experiment: Experiment, best: list[str]) -> str:
    left = len(experiment.runs) - len(best)
    return f" The {len(best)} best of {len(experiment.runs)} are drawn." if left > 0 else ""


def _series(run: ReportedRun, client: str, metric: Metric) -> Series:
    """Of a panel: the mean over clients, one of them, or the server."""
    if client == "mean":
        return _mean(run, metric)
    return {SERVER: run.server_series(metric), **run.series(metric)}.get(client, {})


def _panels(experiment: Experiment, best: list[str]) -> list[str]:
    """The mean, every client, and the server if it has a model of its own that was scored."""
    runs = (run for label in best for run in experiment.drawn[label])
    served = any(run.server_series(experiment.metric) for run in runs)
    return ["mean", *experiment.clients, *([SERVER] if served else [])]


def _over_rounds(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    look, what = looks(list(experiment.runs)), metric.label

    def draw(canvas: Canvas) -> Figure:
        figure, axes = canvas.panels(
            len(panels), 2.1, 2 if canvas.narrow else 3, "round", f"{experiment.split} {what}"
        )
        for axis, client in zip(axes, panels, strict=True):
            for label in best:
                runs = experiment.drawn[label]
                x, mean, spread = over_seeds(_series(run, client, metric) for run in runs)
                style, colour = look[label], canvas.colour(look[label])
                axis.plot(
                    x, mean, color=colour, marker=style.marker, linestyle=style.dash, label=label
                )
                axis.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.18, lw=0)
            axis.set_title("mean over clients" if client == "mean" else client)
            if not metric.share:
                axis.set_yscale("log")
                _plain_log(axis.yaxis, 4)
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        canvas.legend(figure, axes[0], max(map(len, best)))
        return figure

    return Picture(
        metric.key,
        f"{_title(experiment)} over rounds",
        f"Each model on its own {experiment.split} text after every evaluated round, as "
        f"the method reports it{_scale(metric)}. {SPREAD} {metric.better}"
        f"{_some(experiment, best)}",
        f"Lines of {what} by round for {listed(best)}: a panel for the mean and one for "
        f"each of {listed(panels[1:])}. The table has the means.",
        draw,
        _rounds_table(experiment),
    )


def _scale(metric: Metric) -> str:
    return "" if metric.share else "; the scale is logarithmic"


def _plain_log(axis: Axis, count: int) -> None:
    """A few evenly spaced round numbers on a logarithmic axis that holds its data already."""
    low, high = axis.get_view_interval()
    edge = (high / low) ** 0.12
    digits = 2 if high > 1.5 * low else 3
    ticks = np.geomspace(low * edge, high / edge, count)
    axis.set_ticks(sorted({float(f"{tick:.{digits}g}") for tick in ticks}))
    axis.set_major_formatter(lambda value, _: number(value))
    axis.set_minor_locator(NullLocator())


def _rounds_table(experiment: Experiment) -> Table:
    means = {
        label: [mean for run in runs if (mean := _mean(run, experiment.metric))]
        for label, runs in experiment.drawn.items()
    }
    found = {label: over_seeds(one) for label, one in means.items() if one}
    every = sorted({x for at, _, _ in found.values() for x in at})
    rounds = (
        every if len(every) <= 10 else [every[round(n)] for n in np.linspace(0, len(every) - 1, 10)]
    )
    rows = []
    for label, (at, means, _) in found.items():
        values = dict(zip(at, means, strict=True))
        rows.append([label, *(f"{values[r]:.2f}" if r in values else "" for r in rounds)])
    unit = " (%)" if experiment.metric.share else ""
    return Table(f"Mean over clients by round{unit}", ["method", *map(str, rounds)], rows)


def _final(experiment: Experiment, best: list[str]) -> Picture:
    panels, metric = _panels(experiment, best), experiment.metric
    look, what = looks(list(experiment.runs)), metric.label

    def draw(canvas: Canvas) -> Figure:
        across = 2 if canvas.narrow else min(len(panels), 5)
        height = 0.25 * len(best) + 0.55
        figure, axes = canvas.panels(len(panels), height, across, what, sharey=True)
        for axis, client in zip(axes, panels, strict=True):
            for place, label in enumerate(best):
                runs = experiment.drawn[label]
                last = [s[max(s)] for run in runs if (s := _series(run, client, metric))]
                if not last:
                    continue  # a method without a server's model beside one with it
                _, mean, spread = over_seeds({1: value} for value in last)
                colour = canvas.colour(look[label])
                axis.errorbar(
                    mean, [place], xerr=spread, color=colour, fmt=look[label].marker,
                    markersize=7, elinewidth=1.6, capsize=2.5,
                )  # fmt: skip
            axis.set_title("mean over clients" if client == "mean" else client)
            axis.set_yticks(range(len(best)), best)
            axis.margins(x=0.12, y=0.12)
            if not metric.share:
                axis.set_xscale("log")
                _plain_log(axis.xaxis, 3)
        axes[0].invert_yaxis()
        return figure

    return Picture(
        metric.key,
        f"{_title(experiment)} at the end",
        f"Each model on its own {experiment.split} text, as the method reports "
        f"it{_scale(metric)}. {SPREAD} {metric.better}{_some(experiment, best)}",
        f"Dots of final {what} for {listed(best)}: a panel for the mean and one for each "
        f"of {listed(panels[1:])}. The summary's table has the figures.",
        draw,
    )


def _steps(run: ReportedRun, level: str) -> Series:
    """Mean loss over clients by the number of the update."""
    clients = run.by_client(level).values()
    return mean_series({n: loss for n, (_, loss) in enumerate(one, 1)} for one in clients)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """A running mean of `width` values, of fewer at the ends."""
    ones = np.ones(min(width, len(values)))
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def _losses(experiment: Experiment, levels: list[str]) -> Picture:
    look = looks(list(experiment.runs))
    trained = [
        label for label, runs in experiment.drawn.items() if any(r.names("loss/") for r in runs)
    ]
    shown = [label for label in trained if label in _best(experiment)] or trained[:MOST]
    found = {
        (label, level): over_seeds(s for run in runs if (s := _steps(run, level)))
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
                x, mean, _ = found[label, level]
                width = experiment.drawn[label][0].config["training"]["steps"]
                thin = max(1, len(x) // 300)
                colour = canvas.colour(look[label])
                axis.plot(x[::thin], mean[::thin], color=colour, alpha=0.25, linewidth=0.7)
                line = smooth(mean, width)[::thin] if len(x) else mean
                axis.plot(x[::thin], line, color=colour, linestyle=look[label].dash, label=label)
            axis.set_title(level.removeprefix("loss/"))
        canvas.legend(figure, axes[0], max(map(len, shown)))
        return figure

    names = [level.removeprefix("loss/") for level in levels]
    rows = [
        [label, level.removeprefix("loss/"), number(len(x)), f"{mean[0]:.3f}", f"{mean[-1]:.3f}"]
        for (label, level), (x, mean, _) in found.items()
        if x
    ]
    return Picture(
        "loss",
        "Loss over updates",
        "Mean over clients and seeds of each batch's loss before its update, a panel per level of "
        "the schedule: routers may see validation text. Bold: the running mean over a round's "
        f"steps.{_some(experiment, shown) if len(shown) < len(trained) else ''}",
        f"Lines of loss by update at {listed(names)} for {listed(shown)}.",
        draw,
        Table("Loss, mean over clients", ["method", "level", "updates", "first", "last"], rows),
    )

"""A figure of reports: the scores of each method's best and worst client."""

from collections.abc import Iterator
from typing import Any

from matplotlib.figure import Figure

from coterie import ReportFigure
from coterie.analysis.experiments import Experiment
from coterie.report.style import Canvas, LeftOut, Picture


class Spread(ReportFigure):
    name = "spread"

    def pictures(self, experiment: Experiment) -> Iterator[Picture | LeftOut]:
        """Yield a figure with a bar per method, from the lowest to the highest score."""
        label = experiment.metric.label
        runs = {method: run.headline(experiment.metric) for method, run in experiment.first}
        scores = {
            method: [values[client] for client in experiment.clients if client in values]
            for method, values in runs.items()
        }
        scored = {method: values for method, values in scores.items() if values}
        if not scored:
            yield LeftOut("Best and worst client", "no run has been evaluated yet")
            return

        def draw(canvas: Canvas) -> Figure:
            figure, axes = canvas.panels(1, 0.3 * len(scored) + 0.6, x=label)
            axis: Any = axes[0]
            for row, values in enumerate(scored.values()):
                axis.barh(row, max(values) - min(values), left=min(values))
            axis.set_yticks(range(len(scored)), list(scored))
            return figure

        caption = "Each bar extends from the lowest to the highest score of a client."
        alt = f"Bar chart of {label}, with a bar for each of {', '.join(scored)}."
        yield Picture("spread", "Best and worst client", caption, alt, draw)

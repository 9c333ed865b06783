"""The same chance for all: every method is tried with the same settings, on validation text."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from coterie.analysis.cells import Cells
from coterie.config.run import RunConfig, parse
from coterie.config.tune import check_tune
from coterie.config.values import put
from coterie.engines.session import Session
from coterie.errors import CoterieError, Diverged
from coterie.evaluation.metrics import metric_of
from coterie.files import path_part
from coterie.methods.pretrained import Pretrained

TRIALS = "trials"
"""The folder of trials, beside the runs that they are for."""


class Tuner:
    """Chooses settings for methods, with trials on a session's data.

    tune: values by dotted key, such as {"training.learning_rate": [1e-4, 1e-3]}; all combinations
    are tried. A trial is a run with the session's first seed that is scored on validation text.
    """

    def __init__(self, session: Session, tune: Mapping[str, Sequence[Any]]) -> None:
        check_tune(tune, session.config.evaluation.split)
        combinations = product(*tune.values()) if tune else ()
        self.grid = [dict(zip(tune, values, strict=True)) for values in combinations]
        self.session = session

    def trials(self, row: str, config: RunConfig) -> list[RunConfig]:
        """A row's runs, one for each combination; none for a method that trains nothing.

        Raises CoterieError if one is not valid.
        """
        if isinstance(config.method, Pretrained):
            return []
        try:
            found = [_with(config, settings) for settings in self.grid]
            self.session.check(*found)
        except CoterieError as error:
            raise CoterieError(f"{row} cannot be tuned so: {error}") from error
        name = f"{path_part(row)}-trial"
        return [run.model_copy(update={"name": f"{name}{n}"}) for n, run in enumerate(found, 1)]

    def choose(
        self, cells: Cells, trials: Sequence[RunConfig], path: Path, point: str | None = None
    ) -> tuple[RunConfig, dict[str, Any]]:
        """The run with the best mean over clients on validation text, the first of equals.

        Second, how it was chosen: its `settings`, the `seed`, and all `trials` with their settings
        and figures, of which one that diverged has none. point: trained or aggregated; default:
        what the method reports. Raises CoterieError if all diverged.
        """
        rows: list[dict[str, Any]] = []
        ranked: list[tuple[float, int]] = []
        for number, (settings, trial) in enumerate(zip(self.grid, trials, strict=True)):
            chosen = ", ".join(f"{key} = {value}" for key, value in settings.items())
            cells.report(f"{trial.name}: {trial.label} with {chosen}")
            try:
                scored = trial.evaluation.model_copy(update={"split": "validation"})
                run = trial.model_copy(update={"evaluation": scored})
                _, outcome = cells.finished(self.session, run, path / TRIALS)
            except Diverged as why:
                cells.report(f"{why} This trial is left out.")
                rows.append({"settings": settings, "diverged": True})
                continue
            scores = list(outcome[point or outcome["reports"]].values())
            metric = metric_of(scores, trial.evaluation.metric)
            figure = fmean(score[metric.key] for score in scores)
            rows.append({"settings": settings, metric.key: figure})
            ranked.append((metric.order(figure), number))
        if not ranked:
            raise CoterieError(f"All trials of {trials[0].label} diverged; tune with other values.")
        best = min(ranked)[1]
        return trials[best], {"settings": self.grid[best], "seed": trials[0].seed, "trials": rows}


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The run with other values of some keys."""
    values = config.as_dict()
    for key, value in settings.items():
        put(values, key, value)
    if not any(key.startswith("method.") for key in settings):
        values["method"] = config.method  # it need not be registered
    return parse(values)

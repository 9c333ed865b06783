"""Runs of a comparison or of tuning: each is reused if finished, resumed if begun, else executed.

Tuning tries every method with the same settings and scores the trials on validation text.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from coterie.config.run import RunConfig, parse
from coterie.config.tune import check_tune
from coterie.config.values import put
from coterie.engines.session import Session
from coterie.errors import CoterieError, Diverged
from coterie.evaluation.metrics import metric_of
from coterie.files import path_part
from coterie.methods.pretrained import Pretrained
from coterie.runs import Callback, RunFolder

TRIALS = "trials"
"""The name of the folder of trials, beside the folders of the runs."""


class Cells:
    """An executor of several runs that reports the progress and counts the executed runs."""

    def __init__(
        self, total: int, callbacks: Sequence[Callback], report: Callable[[str], None]
    ) -> None:
        self.total, self.callbacks, self.report = total, callbacks, report
        self.number = 0
        self.worked_on = 0
        """Number of runs that were executed or resumed rather than reused."""

    def finished(
        self, session: Session, config: RunConfig, path: Path
    ) -> tuple[RunFolder, dict[str, Any]]:
        """Return the folder of a run and its outcome; execute or resume the run if necessary.

        Args:
            session: the data and the base.
            config: the run.
            path: the folder that contains the run folder.
        """
        self.number += 1
        folder = self._folder(session, config, path)
        with folder.lock():
            self.worked_on += folder.result is None
            session.finish(folder, config, self.callbacks)
        outcome = folder.outcome
        assert outcome is not None, "the run is finished"
        return folder, outcome

    def _folder(self, session: Session, config: RunConfig, path: Path) -> RunFolder:
        """Return the folder of a run: the existing one if it can be reused, else a new one."""
        description = session.description(config, session.participants(config))
        matches = sorted(path.glob(f"*-{config.digest()}"))  # the row's name may have changed
        folder = RunFolder(matches[0] if matches else path / f"{config.name}-{config.digest()}")
        reusable = folder.is_run and not session.changed(folder, config)
        if reusable:
            state = "" if folder.result is None else " (already finished)"
        else:
            state = " (repeated because the texts have changed)" if folder.is_run else ""
        self.report(f"Run {self.number} of {self.total}: {config.name}{state}")
        return folder if reusable else RunFolder.create(folder.path, description, force=True)


class Tuner:
    """A grid search for the settings of methods on a session's data.

    A trial is a run with the session's first seed that is scored on validation text.

    Args:
        session: the data and the base.
        tune: values by dotted key, such as {"training.learning_rate": [1e-4, 1e-3]}; all
            combinations are tried.
    """

    def __init__(self, session: Session, tune: Mapping[str, Sequence[Any]]) -> None:
        check_tune(tune, session.config.evaluation.split)
        combinations = product(*tune.values()) if tune else ()
        self.grid = [dict(zip(tune, values, strict=True)) for values in combinations]
        self.session = session

    def trials(self, row: str, config: RunConfig) -> list[RunConfig]:
        """Return a row's trials, one per combination; none for a method that trains nothing.

        Raises:
            CoterieError: if a combination is invalid for the method.
        """
        if isinstance(config.method, Pretrained):
            return []
        try:
            candidates = [_with(config, settings) for settings in self.grid]
            self.session.check(*candidates)
        except CoterieError as error:
            raise CoterieError(f"{row} cannot be tuned with these values: {error}") from error
        name = f"{path_part(row)}-trial"
        numbered = enumerate(candidates, 1)
        return [run.model_copy(update={"name": f"{name}{n}"}) for n, run in numbered]

    def choose(
        self, cells: Cells, trials: Sequence[RunConfig], path: Path, point: str | None = None
    ) -> tuple[RunConfig, dict[str, Any]]:
        """Return the trial with the best mean over clients on validation text, and the record.

        The first of equal trials wins.

        Args:
            cells: executes the trials.
            trials: a row's trials, from `trials`.
            path: the folder that contains the run folders.
            point: "trained" or "aggregated"; by default, the point that the method reports.

        Returns:
            The chosen run, and a record of the choice: its `settings`, the `seed`, and all `trials`
            with their settings and scores; a trial that diverged has no score.

        Raises:
            CoterieError: if all trials diverged.
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
            except Diverged as error:
                cells.report(f"{error} This trial is ignored.")
                rows.append({"settings": settings, "diverged": True})
                continue
            scores = list(outcome[point or outcome["reports"]].values())
            metric = metric_of(scores, trial.evaluation.metric)
            mean = fmean(score[metric.name] for score in scores)
            rows.append({"settings": settings, metric.name: mean})
            ranked.append((metric.order(mean), number))
        if not ranked:
            raise CoterieError(f"All trials of {trials[0].label} diverged; tune with other values.")
        best = min(ranked)[1]
        return trials[best], {"settings": self.grid[best], "seed": trials[0].seed, "trials": rows}


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a copy of a run with other values of some keys."""
    values = config.as_dict()
    for key, value in settings.items():
        put(values, key, value)
    if not any(key.startswith("method.") for key in settings):
        # The objects themselves, as they may not be registered.
        values["method"] = config.method
    if "aggregation.transforms" not in settings:
        put(values, "aggregation.transforms", config.transforms)
    return parse(values)

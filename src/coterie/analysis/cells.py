"""Execution of the runs of a comparison, and tuning of methods' settings.

A finished run is reused, an interrupted run is resumed, and any other run is executed. The tuner
tries the same combinations of settings for every method, and scores the trials on validation text.
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

Report = Callable[[str], None]
"""Function that is called with a line of text about the progress."""
TRIALS = "trials"
"""The name of the folder of trials. It is in the folder that contains the run folders."""


class Cells:
    """An executor of cells. A cell is one run of a comparison.

    The executor reports progress, and counts the runs that it executes or resumes.

    Args:
        total: The number of runs.
        callbacks: The callbacks of every run that is executed or resumed.
        report: A function that is called with progress messages.
    """

    def __init__(self, total: int, callbacks: Sequence[Callback], report: Report) -> None:
        self.total, self.callbacks, self.report = total, callbacks, report
        self.number = 0
        self.worked_on = 0
        """The number of runs that were executed or resumed rather than reused."""

    def finished(
        self, session: Session, config: RunConfig, path: Path
    ) -> tuple[RunFolder, dict[str, Any]]:
        """Finish a run if it is not yet finished, and return the run's folder and outcome.

        Args:
            session: The session that holds the data and the base.
            config: The run's configuration.
            path: The folder that contains the run folder.
        """
        self.number += 1
        folder = self._folder(session, config, path)
        with folder.lock():
            self.worked_on += folder.result is None
            session.finish(folder, config, self.callbacks)
        outcome = folder.outcome
        assert outcome is not None, "a finished run has an outcome"
        return folder, outcome

    def _folder(self, session: Session, config: RunConfig, path: Path) -> RunFolder:
        """Return a run's existing folder if the folder can be reused; otherwise, create a folder.

        An existing folder can be reused if the texts of the run's clients and server have not
        changed since the run started.
        """
        description = session.description(config, session.participants(config))
        matches = sorted(path.glob(f"*-{config.digest()}"))  # the row may have been renamed
        folder = RunFolder(matches[0] if matches else path / f"{config.name}-{config.digest()}")
        reusable = folder.is_run and not session.changed(folder, config)
        if reusable:
            state = "" if folder.result is None else " (already finished)"
        else:
            state = " (repeated because the texts have changed)" if folder.is_run else ""
        self.report(f"Run {self.number} of {self.total}: {config.name}{state}")
        return folder if reusable else RunFolder.create(folder.path, description, force=True)


class Tuner:
    """A grid search for the best settings of methods on the data of a session.

    A trial is a run with one combination of settings. Every trial has the session's first seed and
    is scored on validation text.

    Args:
        session: The session that holds the data and the base.
        tune: The values to try for each key of the run file, such as
            {"training.learning_rate": [1e-4, 1e-3]}. All combinations of the values are tried.
    """

    def __init__(self, session: Session, tune: Mapping[str, Sequence[Any]]) -> None:
        check_tune(tune, session.config.evaluation.split)
        combinations = product(*tune.values()) if tune else ()
        self.grid = [dict(zip(tune, values, strict=True)) for values in combinations]
        self.session = session

    def trials(self, row: str, config: RunConfig) -> list[RunConfig]:
        """Return one trial for each combination of settings, for one row of the comparison.

        Args:
            row: The name of the row.
            config: The configuration of the row's run.

        Returns:
            The trials; an empty list if the method trains nothing.

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
        """Run the trials of a row, and choose the trial with the best score on validation text.

        A trial's score is the mean over clients. If several trials have the best score, the first
        of these trials is chosen.

        Args:
            cells: The executor of the trials.
            trials: The trials of the row, as returned by the method `Tuner.trials`.
            path: The folder that contains the run folders.
            point: The point of a round at which models are scored, "trained" or "aggregated". None
                selects the point at which the method reports scores.

        Returns:
            The chosen run, and a mapping that describes the choice. The entry `settings` contains
            the chosen settings, `seed` is the seed of all trials, and `trials` lists the settings
            and the score of every trial. A trial that diverged has the entry `diverged` instead of
            a score.

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
    """Return a copy of a run's configuration in which some keys have other values."""
    values = config.as_dict()
    for key, value in settings.items():
        put(values, key, value)
    if not any(key.startswith("method.") for key in settings):
        # Keep the method and transform objects, as their classes may not be registered.
        values["method"] = config.method
    if "aggregation.transforms" not in settings:
        put(values, "aggregation.transforms", config.transforms)
    return parse(values)

"""The runs of a comparison: each in a folder of its own, found again, continued, or run.

Tuning gives all methods the same chance: each is tried with the same settings, on validation text.
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
"""The folder of trials, beside the runs that they are for."""


class Cells:
    """Works on one run after another, and says of each which of how many it is."""

    def __init__(
        self, total: int, callbacks: Sequence[Callback], report: Callable[[str], None]
    ) -> None:
        self.total, self.callbacks, self.report = total, callbacks, report
        self.number = 0
        self.worked_on = 0
        """How many runs were not found finished."""

    def finished(
        self, session: Session, config: RunConfig, path: Path
    ) -> tuple[RunFolder, dict[str, Any]]:
        """The folder of a run, which is in `path`, and its outcome; see `RunFolder.outcome`."""
        self.number += 1
        folder = self._folder(session, config, path)
        with folder.lock():
            self.worked_on += folder.result is None
            session.finish(folder, config, self.callbacks)
        outcome = folder.outcome
        assert outcome is not None, "the run is finished"
        return folder, outcome

    def _folder(self, session: Session, config: RunConfig, path: Path) -> RunFolder:
        """The folder of a run: found again if it is the same run, or made."""
        description = session.description(config, session.participants(config))
        same = sorted(path.glob(f"*-{config.digest()}"))  # perhaps of a row with another name
        folder = RunFolder(same[0] if same else path / f"{config.name}-{config.digest()}")
        kept = folder.is_run and not session.changed(folder, config)
        if kept:
            more = "" if folder.result is None else " (already finished)"
        else:
            more = " (again, as the texts have changed)" if folder.is_run else ""
        self.report(f"Run {self.number} of {self.total}: {config.name}{more}")
        return folder if kept else RunFolder.create(folder.path, description, force=True)


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
            figure = fmean(score[metric.name] for score in scores)
            rows.append({"settings": settings, metric.name: figure})
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
    if "aggregation.transforms" not in settings:
        put(values, "aggregation.transforms", config.transforms)  # nor do these
    return parse(values)

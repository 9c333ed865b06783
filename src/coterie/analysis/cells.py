"""The runs of a comparison: each in a folder of its own, found again, continued, or run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.config.run import RunConfig
from coterie.engines.session import Session
from coterie.runs import RunFolder, Watch


class Cells:
    """Works on one run after another, and says of each which of how many it is."""

    def __init__(
        self, total: int, watch: Callable[[], Watch], report: Callable[[str], None]
    ) -> None:
        self.total, self.watch, self.report = total, watch, report
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
            session.finish(folder, config, self.watch)
        outcome = folder.outcome
        assert outcome is not None, "the run is finished"
        return folder, outcome

    def _folder(self, session: Session, config: RunConfig, path: Path) -> RunFolder:
        """The folder of a run: found again if it is the same run, or made."""
        description = session.description(config, session.participants(config))
        same = sorted(path.glob(f"*-{config.digest()}"))  # perhaps of a row with another name
        folder = RunFolder(same[0] if same else path / f"{config.name}-{config.digest()}")
        if not folder.is_run:
            self._say(config)
        elif session.changed(folder, config):
            self._say(config, " (again, as the texts have changed)")
        else:
            self._say(config, "" if folder.result is None else " (already finished)")
            return folder
        return RunFolder.create(folder.path, description, force=True)

    def _say(self, config: RunConfig, more: str = "") -> None:
        self.report(f"Run {self.number} of {self.total}: {config.name}{more}")

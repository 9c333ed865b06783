"""The metrics of a turn, which are recorded while the turn is in progress."""

import logging
from collections.abc import Callable

from coterie.messages import Json
from coterie.messages.schema import plain
from coterie.turn import FIRST

log = logging.getLogger(__name__)


class Recorder:
    """The metrics of the turn in progress, which stay in memory until the turn is complete."""

    def __init__(self, seen: Callable[[int, str | None, str, Json], None]) -> None:
        self._seen = seen
        self._lines: list[dict[str, Json]] = []
        self.turn = FIRST

    def log(self, client: str | None, name: str, value: Json, round: int | None = None) -> None:
        """Record a metric, unless the value contains NaN or infinity, which JSON cannot represent.

        A `client` of None stands for the whole run, and a `round` of None for the current round.
        """
        if not plain(value):
            log.warning("the metric %r of %s is not finite and is not recorded", name, client)
            return
        of, number = self.turn.round if round is None else round, self.turn.number
        line = {"round": of, "client": client, "name": name, "value": value}
        self._lines.append(line if of == number else {**line, "during": number})
        self._seen(of, client, name, value)

    @property
    def count(self) -> int:
        """The number of metrics that are recorded for the turn in progress."""
        return len(self._lines)

    def undo(self, start: int, end: int | None = None, *, keep: str | None = None) -> None:
        """Delete metrics of the turn in progress; indices count from 0 in the order of recording.

        Args:
            start: The value of `count` just before the first metric to delete was recorded.
            end: The index after the last metric to delete; None: delete all later metrics.
            keep: Metrics whose names begin with this prefix are not deleted; None: no exceptions.
        """
        span, prefixes = self._lines[start:end], () if keep is None else (keep,)
        self._lines[start:end] = [line for line in span if line["name"].startswith(prefixes)]

    def take(self) -> list[dict[str, Json]]:
        """Return the recorded metrics, and clear the recorder."""
        lines, self._lines = self._lines, []
        return lines

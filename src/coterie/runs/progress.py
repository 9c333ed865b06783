"""Log files and callbacks, which follow a run while it is in progress."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from coterie.files import LogFile
from coterie.messages import Json


@contextmanager
def logged(path: Path, *names: str) -> Iterator[None]:
    """Write the records of loggers to a log file in the block, and not to the terminal.

    Handlers that users have added to loggers of Coterie also receive the records.

    Args:
        path: The log file, to which lines are appended.
        names: The names of the loggers.
    """
    handler = LogFile(path)
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        own = logger.handlers if logger.name.startswith("coterie") else []
        logger.handlers, logger.propagate = [*own, handler], False
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()


class Watch:
    """Follows one run; the default one shows nothing."""

    def warn(self, text: str) -> None:
        """There is something to know before the run begins."""

    def trains(self, title: str, where: Sequence[str]) -> None:
        """A run is about to begin, whose adapters stand there."""

    def start(self, title: str, rounds: int, done: int, clients: int, tokens: int) -> None:
        """A run begins: `done` of its rounds are done; an update reads `tokens` tokens."""

    def seen(self, client: str | None, name: str, value: Json) -> None:
        """A figure was logged."""

    def worked(self, round: int, client: str) -> None:
        """A client finished its part of a round."""

    def round_over(self, round: int, note: str) -> None:
        """A round is complete and saved."""

    def __enter__(self) -> Self:
        """The run begins."""
        return self

    def __exit__(self, *error: object) -> None:
        """The run is over or has failed."""

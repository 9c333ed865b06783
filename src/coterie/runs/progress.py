"""Log files and callbacks, which follow a run while it is in progress."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class RunStart:
    """What a callback is told when a run begins or continues."""

    method: str
    """The method's name in tables."""
    rounds: int
    """The number of exchanges of the whole run: one a round, unless the method takes more."""
    done: int
    """The number of exchanges that are complete: 0, or more in a run that continues."""
    clients: tuple[str, ...]
    """The names of the clients."""
    tokens: int
    """The mean number of tokens that a client reads in a training step."""
    adapters: tuple[str, ...]
    """What is trained where, in a sentence for each kind of adapter."""


class Callback:
    """Follows runs while they work; a subclass overrides the hooks that it needs.

    Pass objects to `coterie.run`, `coterie.resume` or `coterie.compare` as `callbacks=[...]`. One
    object follows every run of the call, one after another: the baselines, then the run's own
    method. Hooks are called in the process and thread of the caller, in the order of the list.

    A hook must not change what it is given. An exception that a hook raises stops the run and
    reaches the caller of `coterie.run`; the folder then holds the rounds that are complete, and
    `coterie.resume` continues after them. To stop a run on purpose, raise KeyboardInterrupt in
    `on_round_end`. Rounds are numbered from 0, as in metrics.jsonl; a method with several
    exchanges a round, such as FedMKT-FedAvg, counts exchanges.
    """

    def on_warning(self, text: str) -> None:
        """Take a warning, such as text that several clients hold, or a client that diverged.

        Args:
            text: a sentence for a person. It may come before `on_run_begin`.
        """

    def on_run_begin(self, run: RunStart) -> None:
        """Take note of a run that begins or continues; a finished run has no hooks called.

        Args:
            run: the method, the clients and the rounds.
        """

    def on_metric(self, round: int, client: str | None, name: str, value: Json) -> None:
        """Take a metric as soon as it is logged.

        Metrics that a client logged are deleted from metrics.jsonl, but not taken back here, if the
        server then excludes the client's upload from the round.

        Args:
            round: the round that the metric belongs to.
            client: the client's name; None for a metric of the run or of the server.
            name: the name in metrics.jsonl, such as `loss/experts`, `test/trained` or `bytes/up`.
            value: the value in metrics.jsonl: a number, or for scores a mapping.
        """

    def on_client_end(self, round: int, client: str) -> None:
        """Take note that a client has trained, and that its upload has arrived.

        Args:
            round: the round in progress.
            client: the client's name.
        """

    def on_round_end(self, round: int, scores: str) -> None:
        """Take note that a round is complete and saved.

        Args:
            round: the round that is complete.
            scores: the mean score in words; empty if no model was scored in the round.
        """

    def on_run_end(self, error: BaseException | None) -> None:
        """Take note that a run has ended; it is called once for each `on_run_begin`.

        Args:
            error: what stopped the run; None if it is finished.
        """

"""Log files of a run in progress, and callbacks that follow the run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coterie.files import LogFile
from coterie.messages import Json


@contextmanager
def logged(path: Path, *names: str, log_format: logging.Formatter | None = None) -> Iterator[None]:
    """Write log records to a file instead of the terminal while the with block runs.

    Handlers that users have added to loggers of Coterie also receive the log records.

    Args:
        path: The log file, to which lines are appended.
        names: The names of the loggers whose log records are written.
        log_format: The format of lines; None: plain text.
    """
    handler = LogFile(path)
    if log_format is not None:
        handler.setFormatter(log_format)
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
    """The information that callbacks receive when a run begins or continues."""

    method: str
    """The method's name in tables."""
    rounds: int
    """The number of rounds of the whole run."""
    done: int
    """The number of complete rounds: 0 for a new run."""
    clients: tuple[str, ...]
    """The names of the clients."""
    tokens: int
    """The mean number of tokens that a client reads in a training step."""
    adapters: tuple[str, ...]
    """Lines of text that describe, for each kind of adapter, which modules the adapter modifies."""
    turns: int
    """The number of times that each client trains or replies in the whole run: once per round,
    unless the method or a transform needs several turns per round."""
    turns_done: int
    """The number of these turns that are complete."""


class Callback:
    """An object that follows runs in progress; subclasses override the hooks that they need.

    Pass objects to `coterie.run`, `coterie.resume` or `coterie.compare` as `callbacks=[...]`. If
    the function executes several runs one after another, every object in the list follows all of
    these runs. For example, `coterie.run` first executes a run for each baseline, and then the run
    with the method of the run file. With `jobs` greater than 1, the objects follow only the runs in
    the process of the caller. For each event, the objects' hooks are called in the order of the
    list, in the process and thread of the caller.

    A hook must not change its arguments. An exception in a hook stops the run and is passed on to
    the caller of `coterie.run`. The run folder then contains all complete rounds, and
    `coterie.resume` continues after them. To stop a run on purpose, raise KeyboardInterrupt in
    `on_round_end`. Rounds are numbered from 0, as in metrics.jsonl.
    """

    def on_warning(self, text: str) -> None:
        """Handle a warning, for example that several clients have the same text.

        The hook may be called before `on_run_begin`.

        Args:
            text: The warning, a sentence for the user.
        """

    def on_run_begin(self, run: RunStart) -> None:
        """Handle the beginning or the continuation of a run.

        No hook is called for a run that is already finished.

        Args:
            run: The method, the clients and the rounds.
        """

    def on_metric(self, round: int, client: str | None, name: str, value: Json) -> None:
        """Handle a metric, as soon as the metric is recorded.

        The hook may receive metrics that are later left out of metrics.jsonl. This happens if the
        client's training diverges, or if the server excludes the client's upload from the round. No
        hook reports that a metric is left out.

        Args:
            round: The round that the metric belongs to.
            client: The client's name; None for a metric of the run or of the server.
            name: The name in metrics.jsonl, such as `loss/experts`, `test/trained` or `bytes/up`.
            value: The value in metrics.jsonl, such as a number, or a mapping for scores.
        """

    def on_client_end(self, round: int, client: str) -> None:
        """Handle the arrival of a client's upload, after the client has trained.

        A method such as FedMKT-FedAvg needs several uploads of each client per round.

        Args:
            round: The round in progress.
            client: The client's name.
        """

    def on_round_end(self, round: int, scores: str) -> None:
        """Handle the end of a round, which is complete and saved.

        Args:
            round: The round that is complete.
            scores: The mean score as text; empty if no model was scored in the round.
        """

    def on_run_end(self, error: BaseException | None) -> None:
        """Handle the end of a run.

        The hook is called once for each call of `on_run_begin`.

        Args:
            error: The exception that stopped the run; None if the run is finished.
        """

"""The round loop (Algorithm 1 of most papers), independent of where the clients work.

Messages are serialised and validated as if they were sent between machines, so that the results are
bit-identical to the results of a deployment. Uploads are stored on disk and aggregated in the order
of client names, so the order in which clients finish has no influence.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any, Generic, TypeVar

from coterie.bases import Base, load_skeleton
from coterie.config.run import RunConfig
from coterie.engines.clients import Clients
from coterie.engines.results import result
from coterie.engines.runtime import AT_THE_END
from coterie.engines.server_part import ServerPart
from coterie.engines.uploads import Uploads
from coterie.errors import Diverged, no_client_left
from coterie.evaluation.metrics import metric_of
from coterie.federation.participants import Participant
from coterie.messages import Json, State
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import BYTES, BYTES_UP, KEPT_SCORE, LEFT_OUT, SECONDS, TEST
from coterie.runs import Callback, Recorder, RunFolder, RunStart
from coterie.training.context import ClientId

C = TypeVar("C", bound=Clients)


class Rounds(ServerPart, Generic[C]):
    """The round loop of a run. It starts the run, or continues it from the newest checkpoint.

    Args:
        clients: The class of the run's clients, or a function that creates them.
        config: The run.
        base: The run's base.
        participants: The clients' data.
        folder: The run folder.
        callbacks: The callbacks whose hooks are called during the run.
        own: The data of the server itself; None if the server has no model.
    """

    def __init__(
        self,
        clients: Callable[..., C],
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        callbacks: Sequence[Callback] = (),
        own: Participant | None = None,
    ) -> None:
        self.names = [p.name for p in participants]
        self.callbacks = callbacks
        recorder = Recorder(partial(_log, callbacks))  # a method would cause a reference cycle
        skeleton = load_skeleton(config.base, config.root)  # the server's tensors are on the CPU
        super().__init__(config, skeleton, self.names, own, folder, recorder)
        self.tokens = _tokens(config, participants)
        self.lost: set[ClientId] = set()
        """The clients whose last upload was not accepted."""
        self.uploads = Uploads(Path(gettempdir()), self.server, self.aggregation, strict=True)
        by_name = {p.name: p for p in participants}
        self.clients = clients(config, base, by_name, folder, recorder)
        if self.clients.in_process:
            self._join()

    def _join(self) -> None:
        for name, data in sorted(self.clients.hellos()):
            hello = self.schema.receive("hello", data)
            self.server.prepare(name, hello)
            self.join(name, hello)

    def run(self) -> None:
        """Run all remaining exchanges, and write the result to the run folder."""
        config = self.config
        with self.clients.at_work():
            if not self.clients.in_process:
                self._join()
            complete = self._restore()
            with ExitStack() as stack:
                start = self._start(complete)
                for callback in self.callbacks:
                    stack.push(partial(_end, callback))
                    callback.on_run_begin(start)
                for round in range(complete, config.exchanges):
                    if not (names := self._active(round)):
                        break
                    self._round(round, names)
            self.folder.finish(result(config, self.folder))
            self.folder.drop(self.folder.checkpoints()[:-1])

    def exchange(self, round: int, names: Sequence[ClientId]) -> None:
        """Execute an exchange: download, training, upload and aggregation.

        Args:
            round: The number of the exchange in the run; the first is 0. It is not the number of
                the round if a round consists of several exchanges.
            names: The clients of the exchange.

        Raises:
            Diverged: If all clients diverged.
        """
        self.open(round, sorted(names))
        self.uploads.begin()
        errors: list[Diverged] = []
        spans: dict[ClientId, tuple[int, int]] = {}
        recorded = self.recorder.count
        for name, upload in self.clients.step(round, names, self.download, self.lost):
            if isinstance(upload, Diverged):
                errors.append(upload)
                self.uploads.diverge(name)
                for callback in self.callbacks:
                    callback.on_warning(
                        f"Round {round + 1} goes on without {name}: {FAULT_MESSAGES['diverged']}."
                    )
            else:
                self.uploads.take(name, upload)
                for callback in self.callbacks:
                    callback.on_client_end(round, name)
            spans[name] = recorded, (recorded := self.recorder.count)
        if len(errors) == len(names):
            raise no_client_left(round, errors[0])
        mean, refused = self.uploads.mean(round), self.uploads.refused.keys()
        for name in reversed(spans):  # removing a later span does not move earlier ones
            if name in refused - self.uploads.diverged:
                self.clients.undo(name)
                self.recorder.undo(*spans[name], keep=BYTES)
        self.lost = self.lost - {*names} | refused
        self.uploads.record(self.recorder)
        self.close(mean, self.uploads.counted)

    def _round(self, round: int, names: Sequence[ClientId]) -> None:
        """Execute an exchange, score models if evaluation is due, and write a checkpoint.

        Args:
            round: The number of the exchange, counted from the start of the run.
            names: The clients of the exchange.
        """
        began = time.monotonic()
        self.recorder.round = round
        self.exchange(round, names)
        last = round + 1 == self.config.exchanges or not self._active(round + 1)
        self.score(round, last=last)
        if last:
            self.clients.finish(round, self.download, self.lost)
        self.recorder.log(None, SECONDS, time.monotonic() - began)
        entries = self.recorder.take()
        self.folder.append(entries)
        self.folder.save(round + 1, self._states())
        scores = score_summary(self.config, round, entries)
        for callback in self.callbacks:
            callback.on_round_end(round, scores)

    def _start(self, complete: int) -> RunStart:
        """Return the argument of `Callback.on_run_begin`.

        Args:
            complete: The number of exchanges of the run that are already complete.
        """
        adapters = tuple(line for kind in sorted(self.clients.covered()) for line in kind)
        rounds, names = self.config.exchanges, tuple(self.names)
        return RunStart(self.config.label, rounds, complete, names, self.tokens, adapters)

    def _active(self, rounds: int) -> list[ClientId]:
        """Return the clients that have not stopped training early.

        Args:
            rounds: The number of complete exchanges in the run. It is greater than the number of
                complete rounds if a round consists of several exchanges.
        """
        if self.config.evaluation.patience is None:
            return self.names
        return [name for name in self.names if not self.clients.stops(name, rounds)]

    def _states(self) -> Iterator[tuple[str, State | None]]:
        yield from self.states()
        yield from self.clients.states()

    def _restore(self) -> int:
        """Restore the newest checkpoint, and return the number of exchanges that are complete."""
        complete = self.folder.rounds()
        self.folder.forget_from(complete)
        if complete:
            self.restore()
            self.clients.restore()
            self.lost = _lost(self.folder)
        return complete


def _log(
    callbacks: Sequence[Callback], round: int, client: ClientId | None, name: str, value: Json
) -> None:
    for callback in callbacks:
        callback.on_metric(round, client, name, value)


def _end(callback: Callback, _: object, error: BaseException | None, __: object) -> None:
    callback.on_run_end(error)


def _tokens(config: RunConfig, participants: Sequence[Participant]) -> int:
    """Return the mean number of tokens that a client reads in a training step."""
    window = config.data.window
    sample = fmean(p.data.train.sample_tokens(window) for p in participants)
    texts = sum(len(p.tests) for p in participants) if config.pooled else 1
    return int(config.training.batch * sample * texts)


def _lost(folder: RunFolder) -> set[ClientId]:
    """Return the clients whose last upload was not accepted, according to recorded metrics."""
    lost: set[ClientId] = set()
    for line in folder.metrics():
        if line["name"] == LEFT_OUT and line["value"] != AT_THE_END:
            lost.add(line["client"])
        elif line["name"] == BYTES_UP:
            lost.discard(line["client"])
    return lost


def score_summary(config: RunConfig, round: int, entries: list[dict[str, Json]]) -> str:
    """Return the mean score over all texts after an exchange, for progress messages.

    If the entries contain scores of clients' best models, the mean of these scores comes first, and
    the mean score of the clients' last models follows in brackets.

    Args:
        config: The run.
        round: The number of the exchange in the run; the first is 0. It is not the number of the
            round if a round consists of several exchanges.
        entries: The metrics that were recorded in the exchange.

    Returns:
        The name of the metric and the score, or an empty string if no model was scored.
    """
    lines = [line for line in entries if line["name"] == f"{TEST}{config.method.reports}"]
    last = max((line["round"] for line in lines), default=round)
    latest = {line["client"]: line["value"] for line in lines if line["round"] == last}
    best = {line["client"]: line["value"] for line in entries if line["name"] == KEPT_SCORE}
    if not latest:
        return ""
    metric = metric_of(list(latest.values()), config.evaluation.metric)
    unit = " %" if metric.share else ""

    def mean(scores: Mapping[str, Any]) -> str:
        total = sum(score[metric.name] for score in scores.values())
        return f"{metric.cell(total / len(scores))}{unit}"

    after = "" if last == round else f" after round {last + 1}"
    if (headline := mean(latest | best)) != mean(latest):
        after = f" (last round {mean(latest)})"
    return f"{config.evaluation.split} {metric.title} {headline}{after}  "

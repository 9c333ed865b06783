"""The round loop (Algorithm 1 of most papers), independent of where the clients work.

Messages are serialised and validated as if they were sent between machines, so that the results are
bit-identical to the results of a deployment. Uploads are stored on disk and aggregated in the order
of client names, so the order in which clients finish has no influence.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any, Generic, TypeVar

from coterie.bases import Base, load_skeleton
from coterie.config.run import RunConfig
from coterie.engines.client_host import AT_THE_END
from coterie.engines.clients import Clients
from coterie.engines.server_host import ServerHost
from coterie.errors import Diverged, no_client_left
from coterie.evaluation.metrics import metric_of
from coterie.federation.participants import Participant
from coterie.messages import Json, State
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.messages.names import BYTES, BYTES_UP, KEPT_SCORE, LEFT_OUT, SECONDS, TEST
from coterie.runs import Callback, Recorder, RunFolder, RunStart
from coterie.runs.result import result
from coterie.runs.state_file import StateFile
from coterie.runs.store import Stored
from coterie.training.context import ClientId
from coterie.turn import Turn

C = TypeVar("C", bound=Clients)


class Rounds(ServerHost, Generic[C]):
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
        super().__init__(config, skeleton, self.names, own, folder, recorder, strict=True)
        self.tokens = _tokens(config, participants)
        self.lost: set[ClientId] = set()
        """The clients whose last upload was not accepted."""
        self.entries: list[dict[str, Json]] = []
        """The metrics that were recorded in the complete turns of the round in progress."""
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
        """Run all remaining rounds, and write the result to the run folder."""
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
                for turn in map(config.turn, range(complete, config.turns)):
                    if not (names := self._active(turn)):
                        break
                    self._take(turn, names)
            self.folder.finish(result(self.folder, config.label, config.method.reports))
            self.folder.drop(self.folder.checkpoints()[:-1])

    def step(self, turn: Turn, names: Sequence[ClientId]) -> None:
        """Execute a turn: download, training, upload and aggregation.

        Args:
            turn: The turn.
            names: The clients that take part. After training, clients without an upload do not.

        Raises:
            Diverged: If all clients diverged.
        """
        if turn.after:
            uploaded = self.exchange.uploaded
            names = [name for name in names if name in uploaded]
        self.open(turn, sorted(names))
        self.exchange.begin()
        errors: list[Diverged] = []
        spans: dict[ClientId, tuple[int, int]] = {}
        recorded = self.recorder.count
        for name, upload in self.clients.step(turn, names, self.download, self.lost):
            if isinstance(upload, Diverged):
                errors.append(upload)
                self.exchange.diverge(name)
                for callback in self.callbacks:
                    callback.on_warning(
                        f"Round {turn.round + 1} goes on without {name}: "
                        f"{FAULT_MESSAGES['diverged']}."
                    )
            else:
                self.take(name, upload)
                for callback in self.callbacks:
                    callback.on_client_end(turn.round, name)
            spans[name] = recorded, (recorded := self.recorder.count)
        if errors and len(errors) == len(names):
            raise no_client_left(turn.round, errors[0])
        self.exchange.settle()
        refused = self.exchange.refused.keys()
        for name in reversed(spans):  # removing a later span does not move earlier ones
            if name in refused - self.exchange.diverged:
                self.clients.undo(name)
                self.recorder.undo(*spans[name], keep=BYTES)
        self.lost = self.lost - {*names} | refused
        self.exchange.record(self.recorder)
        self.close()

    def _take(self, turn: Turn, names: Sequence[ClientId]) -> None:
        """Execute a turn; score models and write a checkpoint if they are due."""
        began = time.monotonic()
        self.recorder.turn, number = turn, turn.number + 1
        self.step(turn, names)
        ends = number == self.config.turns or not self._active(self.config.turn(number))
        self.score(turn, ends=ends)
        if ends:
            self.clients.finish(turn, self.download, self.lost)
        self.recorder.log(None, SECONDS, time.monotonic() - began)
        entries = self.recorder.take()
        self.folder.append(entries)
        self.clients.new.complete()
        if ends or (turn.round + 1) % self.config.checkpoint.every == 0:
            self.folder.save(number, self._states(), keep=2 * len(self.config.phases))
        self.entries += entries
        if turn.ends_round or ends:
            scores, self.entries = score_summary(self.config, turn.round, self.entries), []
            for callback in self.callbacks:
                callback.on_round_end(turn.round, scores)

    def _start(self, complete: int) -> RunStart:
        """Return the argument of `Callback.on_run_begin`.

        Args:
            complete: The number of turns of the run that are already complete.
        """
        adapters = tuple(line for kind in sorted(self.clients.covered()) for line in kind)
        config, names = self.config, tuple(self.names)
        done, turns = config.turn(complete).round, config.turns
        return RunStart(
            config.label, config.rounds, done, names, self.tokens, adapters, turns, complete
        )

    def _active(self, turn: Turn) -> list[ClientId]:
        """Return the clients that take part in a turn, as they have not stopped training early."""
        if self.config.evaluation.patience is None:
            return self.names
        return [name for name in self.names if not self.clients.stops(name, turn.round)]

    def _states(self) -> Iterator[tuple[str, State | Stored | StateFile | None]]:
        yield from self.states()
        yield from self.clients.states()

    def _restore(self) -> int:
        """Restore the newest checkpoint, and return the number of turns that are complete."""
        complete = self.folder.turns()
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
    """Return the mean score over all texts after a round, for progress messages.

    If the entries contain scores of clients' best models, the mean of these scores comes first, and
    the mean score of the clients' last models follows in brackets.

    Args:
        config: The run.
        round: The number of the round; the first is 0.
        entries: The metrics that were recorded in the turns of the round.

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

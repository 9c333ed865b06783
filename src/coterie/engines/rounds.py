"""The rounds of a run: Algorithm 1 of most papers, wherever the clients work.

Every message goes through its bytes and its checks, as it would between machines, so that nothing
is rounded or let through here that is not there. Uploads wait on disk and are counted by the order
of names, so the order of work is irrelevant.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import gettempdir
from typing import Any, Generic, TypeVar

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.clients import Clients
from coterie.engines.runtime import AT_THE_END, result
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
    """One method on one federation, from its newest checkpoint (or the start) to its result.

    Args:
        clients: where the clients work.
        config: the run.
        base: the run's base.
        participants: what the clients hold.
        folder: the run's folder.
        callbacks: what follows the run.
        own: what a server with a model of its own holds.
    """

    def __init__(
        self,
        clients: type[C],
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        callbacks: Sequence[Callback] = (),
        own: Participant | None = None,
    ) -> None:
        self.names = [p.name for p in participants]
        self.callbacks = callbacks
        recorder = Recorder(partial(_log, callbacks))  # without `self`: it would be a cycle
        super().__init__(config, base.model, self.names, own, folder, recorder)
        self.tokens = _tokens(config, participants)
        self.lost: set[ClientId] = set()
        """Clients whose upload did not count in the last round that they took part in."""
        self.uploads = Uploads(Path(gettempdir()), self.server, self.aggregation, strict=True)
        everybody = {p.name: p for p in participants}
        self.clients = clients(config, base, everybody, folder, recorder)
        if self.clients.in_process:
            self._join()

    def _join(self) -> None:
        for name, data in sorted(self.clients.hellos()):
            hello = self.schema.receive("hello", data)
            self.server.prepare(name, hello)
            self.join(name, hello)

    def run(self) -> None:
        """Run all rounds that are left; the folder then holds the result."""
        config = self.config
        with self.clients.at_work():
            if not self.clients.in_process:
                self._join()
            done = self._restore()
            with ExitStack() as stack:
                start = self._start(done)
                for callback in self.callbacks:
                    stack.push(partial(_end, callback))
                    callback.on_run_begin(start)
                for round in range(done, config.exchanges):
                    if not (names := self._left(round)):
                        break
                    self._round(round, names)
            self.folder.finish(result(config, self.folder))
            self.folder.drop(self.folder.checkpoints()[:-1])

    def exchange(self, round: int, names: Sequence[ClientId]) -> None:
        """Carry out Algorithm 1 of most papers: download, training, upload, aggregation."""
        self.open(round, sorted(names))
        self.uploads.begin()
        errors: list[Diverged] = []
        spans: dict[ClientId, tuple[int, int]] = {}
        noted = self.recorder.count
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
            spans[name] = noted, (noted := self.recorder.count)
        if len(errors) == len(names):
            raise no_client_left(round, errors[0])
        mean, refused = self.uploads.mean(round), self.uploads.refused.keys()
        for name in reversed(spans):  # from the last span on, so that earlier ones stay in place
            if name in refused - self.uploads.diverged:
                self.clients.undo(name)
                self.recorder.undo(*spans[name], keep=BYTES)
        self.lost = self.lost - {*names} | refused
        self.uploads.record(self.recorder)
        self.close(mean, self.uploads.counted)

    def _round(self, round: int, names: Sequence[ClientId]) -> None:
        """Carry out a round, score what is due, and save."""
        began = time.monotonic()
        self.recorder.round = round
        self.exchange(round, names)
        last = round + 1 == self.config.exchanges or not self._left(round + 1)
        self.score(round, last=last)
        if last:
            self.clients.finish(round, self.download, self.lost)
        self.recorder.log(None, SECONDS, time.monotonic() - began)
        entries = self.recorder.take()
        self.folder.append(entries)
        self.folder.save(round + 1, self._states())
        scores = note(self.config, round, entries)
        for callback in self.callbacks:
            callback.on_round_end(round, scores)

    def _start(self, done: int) -> RunStart:
        """Return what callbacks are told of the run, of which so many exchanges are done."""
        adapters = tuple(line for kind in sorted(self.clients.covered()) for line in kind)
        rounds, names = self.config.exchanges, tuple(self.names)
        return RunStart(self.config.label, rounds, done, names, self.tokens, adapters)

    def _left(self, rounds: int) -> list[ClientId]:
        """Return the clients that still train after so many rounds."""
        if self.config.evaluation.patience is None:
            return self.names
        return [name for name in self.names if not self.clients.stops(name, rounds)]

    def _states(self) -> Iterator[tuple[str, State | None]]:
        yield from self.states()
        yield from self.clients.states()

    def _restore(self) -> int:
        """Go back to the newest checkpoint; return how many rounds it has."""
        done = self.folder.rounds()
        self.folder.forget_from(done)
        if done:
            self.restore()
            self.clients.restore()
            self.lost = _lost(self.folder)
        return done


def _log(
    callbacks: Sequence[Callback], round: int, client: ClientId | None, name: str, value: Json
) -> None:
    for callback in callbacks:
        callback.on_metric(round, client, name, value)


def _end(callback: Callback, _: object, error: BaseException | None, __: object) -> None:
    callback.on_run_end(error)


def _tokens(config: RunConfig, participants: Sequence[Participant]) -> int:
    """Return how many tokens a training step reads."""
    window = config.data.window
    sample = fmean(p.data.train.sample_tokens(window) for p in participants)
    texts = sum(len(p.tests) for p in participants) if config.pooled else 1
    return int(config.training.batch * sample * texts)


def _lost(folder: RunFolder) -> set[ClientId]:
    """Return the clients whose upload did not count in the last round that they took part in."""
    lost: set[ClientId] = set()
    for line in folder.metrics():
        if line["name"] == LEFT_OUT and line["value"] != AT_THE_END:
            lost.add(line["client"])
        elif line["name"] == BYTES_UP:
            lost.discard(line["client"])
    return lost


def note(config: RunConfig, round: int, entries: list[dict[str, Json]]) -> str:
    """Return the mean score over texts, if models were scored in a round.

    Once the best models are known, the mean is theirs and the last round's is named.
    """
    lines = [line for line in entries if line["name"] == f"{TEST}{config.method.reports}"]
    last = max((line["round"] for line in lines), default=round)
    found = {line["client"]: line["value"] for line in lines if line["round"] == last}
    best = {line["client"]: line["value"] for line in entries if line["name"] == KEPT_SCORE}
    if not found:
        return ""
    metric = metric_of(list(found.values()), config.evaluation.metric)
    unit = " %" if metric.share else ""

    def mean(scores: Mapping[str, Any]) -> str:
        total = sum(score[metric.name] for score in scores.values())
        return f"{metric.cell(total / len(scores))}{unit}"

    after = "" if last == round else f" after round {last + 1}"
    if (headline := mean(found | best)) != mean(found):
        after = f" (last round {mean(found)})"
    return f"{config.evaluation.split} {metric.title} {headline}{after}  "

"""The local engine: all clients and the server in this process, one client at a time.

Every message goes through its bytes and its checks, as it would between machines, so that nothing
is rounded or let through here that is not there. Uploads wait on disk, as do the states of all but
a few clients: memory hardly grows with the number of clients. Uploads are counted in by the order
of names, so the order of work is irrelevant.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from coterie.aggregation.bounds import Measure
from coterie.aggregation.mean import Aggregation, Contribution, Rule, weighted_mean
from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.data.windows import tokens_per_sample
from coterie.engines.clients import ClientParts, ClientSides, NewStates
from coterie.engines.runtime import (
    LEFT_OUT,
    close,
    contribution,
    record,
    restore,
    result,
    score_server,
    server_states,
)
from coterie.errors import Diverged, no_client_left
from coterie.evaluation.metrics import metric_of
from coterie.federation import Participant, server_context
from coterie.files import writing
from coterie.messages import Json, State
from coterie.messages.envelope import TOLD
from coterie.runs import Recorder, RunFolder, Watch
from coterie.training.context import ClientId


class Rounds(ABC):
    """One method on one federation, from its newest checkpoint (or the start) to its result.

    The server is in this process; where the clients work is up to the engine. `own` is what a
    server with a model of its own holds.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        watch: Watch,
        own: Participant | None = None,
        rule: Rule = weighted_mean,
    ) -> None:
        self.config, self.folder, self.watch, self.own = config, folder, watch, own
        self.base, self.first = base, participants[0]
        self.names = [p.name for p in participants]
        self.training = self.names
        """Those who take part in the round in progress."""
        self.diverged: set[ClientId] = set()
        """Clients that have diverged in the last round that they took part in."""
        self.texts = sum(len(p.tests) for p in participants)
        window = config.data.window
        self.sample = fmean(tokens_per_sample(p.data.train, window) for p in participants)
        self.recorder = Recorder(folder, watch.seen)
        self.states = NewStates(folder)
        self.aggregation = Aggregation(config.aggregation, config.method.schema(), rule)
        self.schema = self.aggregation.schema
        log = partial(self.recorder.log, None)
        context = server_context(config, base.model, self.names, own, log)
        self.server = config.method.server(context)

    @abstractmethod
    def _hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """What every client says first, in the order of `names`."""

    @abstractmethod
    def _steps(self, round: int) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """The upload of every client that trains, in their order; its entries are recorded by
        then. A client that diverged has none, and the state from before the round."""

    @abstractmethod
    def _finish(self, round: int) -> None:
        """Let every client take the download after the last round in, in the order of `names`."""

    @abstractmethod
    def _stops(self, name: ClientId, rounds: int) -> bool:
        """Whether a client takes no part in rounds after so many; see `ClientPart.stops`."""

    @abstractmethod
    def _client_states(self) -> Iterator[tuple[str, State | None]]:
        """What a checkpoint has of the clients; see `ClientPart.states`."""

    @abstractmethod
    def _restore_clients(self) -> None:
        """Take every client back to the newest checkpoint."""

    @abstractmethod
    def covered(self) -> set[tuple[str, ...]]:
        """What of their bases clients' adapters stand on; see `ClientPart.covered`."""

    def _join(self) -> None:
        for name, data in sorted(self._hellos()):
            hello = self.schema.receive("hello", data)
            self.aggregation.join(name, hello)
            self.server.prepare(name, hello)
            self.server.join(name, hello)

    def run(self) -> None:
        """All rounds that are left; the folder then holds the result."""
        done = self._restore()
        config = self.config
        tokens = int(config.training.batch * self.sample * (self.texts if config.pooled else 1))
        with self.watch as watch, TemporaryDirectory() as spool:
            watch.start(config.label, config.exchanges, done, len(self.names), tokens)
            for round in range(done, config.exchanges):
                self.training = self._left(round)
                if not self.training:
                    break
                began = time.monotonic()
                self.recorder.round = round
                self._round(round, Path(spool))
                self.recorder.log(None, "seconds", time.monotonic() - began)
                entries = self.recorder.take()
                self.folder.append(entries)
                self.folder.save(round + 1, self._states())
                watch.round_over(round, self._note(round, entries))
        self.folder.finish(result(config, self.folder))
        self.folder.drop(self.folder.checkpoints()[:-1])

    def _round(self, round: int, spool: Path) -> None:
        self.exchange(round, spool)
        last = round + 1 == self.config.exchanges or not self._left(round + 1)
        score_server(self.config, self.server, self.own, round, self.recorder.log, last=last)
        if last:
            self._finish(round)

    def _left(self, rounds: int) -> list[ClientId]:
        """Who still trains after so many rounds."""
        if self.config.evaluation.patience is None:
            return self.names
        return [name for name in self.names if not self._stops(name, rounds)]

    def exchange(self, round: int, spool: Path) -> None:
        """Algorithm 1 of most papers: download, local work, upload; then the server aggregates.

        Uploads are left in the folder `spool`, by name.
        """
        self.server.open(round, sorted(self.training))
        measures: dict[ClientId, Measure] = {}
        diverged: dict[ClientId, Diverged] = {}
        for name, upload in self._steps(round):
            if isinstance(upload, Diverged):
                diverged[name] = upload
                self.watch.warn(f"Round {round + 1} goes on without {name}: {TOLD['diverged']}.")
                continue
            with writing(spool / name):
                (spool / name).write_bytes(upload)
            message = self.schema.receive("up", upload)
            measures[name] = self.aggregation.measure(name, message, self.server.reference(name))
            self.watch.worked(round, name)
        if not measures:
            raise no_client_left(round, next(iter(diverged.values())))
        self.diverged = self.diverged - set(measures) | set(diverged)
        refused = dict.fromkeys(diverged, TOLD["diverged"]) | self.aggregation.left_out(measures)
        record(measures, refused, self.recorder.log)
        names = sorted(measures.keys() - refused.keys())
        mean = self.aggregation.mean(round, self._contributions(names, spool))
        close(self.server, self.aggregation, mean)

    def _contributions(self, names: list[ClientId], spool: Path) -> Iterator[Contribution]:
        """What the uploads that wait on disk add to the mean."""
        for name in names:
            upload = self.schema.receive("up", (spool / name).read_bytes())
            yield contribution(self.server, self.aggregation, name, upload)

    def _download(self, name: ClientId) -> bytes:
        return self.schema.send("down", self.server.download(name))

    def _states(self) -> Iterator[tuple[str, State | None]]:
        yield from server_states(self.server, self.aggregation)
        yield from self._client_states()

    def _restore(self) -> int:
        done = self.folder.rounds()
        self.folder.forget_from(done)
        if done:
            restore(self.server, self.aggregation, self.folder)
            self._restore_clients()
            self.diverged = _diverged(self.folder)
        return done

    def _note(self, round: int, entries: list[dict[str, Json]]) -> str:
        """Return the mean score over texts, if models were scored in a round.

        Once the best models are known, the mean is theirs and the last round's is named.
        """
        scored = f"test/{self.config.method.reports}"
        lines = [line for line in entries if line["name"] == scored]
        last = max((line["round"] for line in lines), default=round)
        found = {line["client"]: line["value"] for line in lines if line["round"] == last}
        best = {line["client"]: line["value"] for line in entries if line["name"] == "test/kept"}
        if not found:
            return ""
        metric = metric_of(list(found.values()), self.config.evaluation.metric)
        unit = " %" if metric.share else ""

        def mean(scores: Mapping[str, Any]) -> str:
            total = sum(score[metric.key] for score in scores.values())
            return f"{metric.cell(total / len(scores))}{unit}"

        after = "" if last == round else f" after round {last + 1}"
        if (headline := mean(found | best)) != mean(found):
            after = f" (last round {mean(found)})"
        return f"{self.config.evaluation.split} {metric.name} {headline}{after}  "


class LocalRun(Rounds):
    """The rounds, with all clients in this process; they share one base in memory.

    Of more than a few clients, the states of those that are not at work are on disk.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        watch: Watch,
        own: Participant | None = None,
        rule: Rule = weighted_mean,
    ) -> None:
        super().__init__(config, base, participants, folder, watch, own, rule)
        self.parts = ClientParts(config, base, participants, self.recorder.log, self.states)
        self.clients = ClientSides(self.parts)
        self._join()

    def run(self) -> None:
        """All rounds that are left; the folder then holds the result."""
        with self.states.emptied():
            super().run()

    def covered(self) -> set[tuple[str, ...]]:
        """See `Rounds`."""
        return self.parts.covered

    def _hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        return self.parts.hellos()

    def _steps(self, round: int) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        for name in self.training:
            download, counted = self._download(name), name not in self.diverged
            before = self.recorder.count
            try:
                upload = self.parts[name].step(round, download, counted=counted)
            except Diverged as error:
                self.recorder.undo(before)
                self.parts.begin_anew(name)
                self.recorder.log(name, "bytes/down", len(download))
                upload = error
            yield name, upload

    def _finish(self, round: int) -> None:
        for name, part in self.parts.items():
            kept, counted = self.states.kept(name), name not in self.diverged
            part.finish(self._download(name), kept, round, counted=counted)
            part.keep_items(self.folder)

    def _stops(self, name: ClientId, rounds: int) -> bool:
        return self.parts.stop(name, rounds)

    def _client_states(self) -> Iterator[tuple[str, State | None]]:
        return self.parts.states()

    def _restore_clients(self) -> None:
        self.parts.restore()


def _diverged(folder: RunFolder) -> set[ClientId]:
    """The clients that diverged in the last round that they took part in, by a run's metrics."""
    diverged: set[ClientId] = set()
    for line in folder.metrics():
        if line["name"] == LEFT_OUT and line["value"] == TOLD["diverged"]:
            diverged.add(line["client"])
        elif line["name"] == "bytes/up":
            diverged.discard(line["client"])
    return diverged

"""The local engine: all clients and the server in this process, one client at a time.

Every message goes through its bytes and its checks, as it would between machines, so that nothing
is rounded or let through here that is not there. Uploads wait on disk and are counted in by the
order of names: memory does not grow with the number of clients and the order of work is irrelevant.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from coterie.base import Base
from coterie.config import RunConfig
from coterie.exchange import Message, State
from coterie.federation import Participant, client_context
from coterie.files import writing
from coterie.methods import ServerContext
from coterie.runs import Recorder, RunFolder, Watch
from coterie.training.evaluation import Score, evaluate


class LocalRun:
    """One method on one federation, from its newest checkpoint (or the start) to its result."""

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        folder: RunFolder,
        watch: Watch,
    ) -> None:
        self.config, self.base, self.folder, self.watch = config, base, folder, watch
        self.participants = {p.name: p for p in participants}
        self.recorder = Recorder(folder, watch.seen)
        self.schema = config.method.schema()
        log = self.recorder.log
        names = tuple(sorted(self.participants))
        self.server = config.method.server(
            ServerContext(config.seed, base.model, names, partial(log, None))
        )
        self.clients = {
            name: config.method.client(client_context(config, base, p, partial(log, name)))
            for name, p in self.participants.items()
        }
        for name in names:
            hello = self.schema.send("hello", self.clients[name].hello())
            self.server.join(name, self.schema.receive("hello", hello))
        self.scores: dict[str, dict[str, dict[str, Score]]] = {}

    def run(self) -> None:
        """All rounds that are left; the folder then holds the result."""
        done = self._restore()
        config = self.config
        tokens = config.training.batch * config.data.window
        if config.pooled:
            tokens *= sum(len(p.tests) for p in self.participants.values())
        with self.watch as watch, TemporaryDirectory() as spool:
            watch.start(config.label, config.rounds, done, len(self.clients), tokens)
            for round in range(done, config.rounds):
                began = time.monotonic()
                self.recorder.round = round
                self._round(round, Path(spool))
                self.recorder.log(None, "seconds", time.monotonic() - began)
                self.recorder.flush()
                self.folder.save(round + 1, self._states())
                watch.round_over(round, self._note(round))
        self.folder.finish(self._result())

    def _round(self, round: int, spool: Path) -> None:
        """Algorithm 1 of most papers: download, local work, upload; then the server aggregates."""
        self.server.open(round, sorted(self.clients))
        for name, client in self.clients.items():
            upload = self.schema.send("up", client.step(self._download(name)))
            with writing(spool / name):
                (spool / name).write_bytes(upload)
            self.recorder.log(name, "bytes/up", len(upload))
            if self._due(round):
                self._score(name, "trained")
            self.watch.worked(round, name)
        for name in sorted(self.clients):
            self.server.receive(name, self.schema.receive("up", (spool / name).read_bytes()))
        self.server.close()
        if self._due(round):
            for name in self.clients:
                self._after_aggregation(name, last=round + 1 == self.config.rounds)

    def _after_aggregation(self, name: str, last: bool) -> None:
        """Score a client as if the run ended here, and let it end if it does."""
        client = self.clients[name]
        if not self.schema.down:
            self._log_scores(name, "aggregated", self.scores[name]["trained"])
            return
        before = client.state()
        client.finish(self._download(name))
        self._score(name, "aggregated")
        if not (last and self.config.method.reports == "aggregated"):
            client.restore(before)

    def _download(self, name: str) -> Message:
        data = self.schema.send("down", self.server.download(name))
        self.recorder.log(name, "bytes/down", len(data))
        return self.schema.receive("down", data)

    def _due(self, round: int) -> bool:
        every = self.config.evaluation.every
        return round + 1 == self.config.rounds or (every is not None and (round + 1) % every == 0)

    def _score(self, name: str, point: str) -> None:
        model = self.clients[name].model()
        window, batch = self.config.data.window, self.config.evaluation.batch
        tests = self.participants[name].tests
        scores = {
            text: evaluate(self.base, model, tokens, window, batch)
            for text, tokens in tests.items()
        }
        self._log_scores(name, point, scores)

    def _log_scores(self, name: str, point: str, scores: dict[str, Score]) -> None:
        self.scores.setdefault(name, {})[point] = scores
        for text, score in scores.items():
            self.recorder.log(text, f"test/{point}", score.as_dict())

    def _states(self) -> Iterator[tuple[str, State]]:
        yield "server", self.server.state()
        for name, client in self.clients.items():
            yield f"client-{name}", client.state()

    def _restore(self) -> int:
        done = self.folder.rounds()
        self.folder.forget_from(done)
        if done:
            self.server.restore(self.folder.load("server"))
            for name, client in self.clients.items():
                client.restore(self.folder.load(f"client-{name}"))
        return done

    def _note(self, round: int) -> str:
        if not self._due(round):
            return ""
        reports = self.config.method.reports
        found = [s for points in self.scores.values() for s in points[reports].values()]
        split = self.config.evaluation.split
        return f"{split} perplexity {sum(s.perplexity for s in found) / len(found):.2f}  "

    def _result(self) -> dict[str, object]:
        """The last scores per text, and what it took: from the metrics, to count all parts."""
        points: dict[str, dict[str, dict[str, float]]] = {"trained": {}, "aggregated": {}}
        traffic = {"bytes/up": 0, "bytes/down": 0}
        seconds = 0.0
        for line in self.folder.metrics():
            kind, _, point = line["name"].partition("/")
            if kind == "test":
                points[point][line["client"]] = line["value"]
            elif line["name"] in traffic:
                traffic[line["name"]] += line["value"]
            elif line["name"] == "seconds":
                seconds += line["value"]
        return {
            "method": self.config.label,
            "reports": self.config.method.reports,
            **points,
            "traffic": {"up": traffic["bytes/up"], "down": traffic["bytes/down"]},
            "seconds": round(seconds, 1),
        }

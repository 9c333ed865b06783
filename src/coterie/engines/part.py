"""One client's part of a run: messages in and out as bytes, and what its model scores."""

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.config import RunConfig
from coterie.exchange import Json, Message
from coterie.federation import Participant, client_context
from coterie.methods import ServerSide
from coterie.runs import RunFolder
from coterie.scoring.evaluation import Score, evaluate

SERVER_SCORE = "server/aggregated"
"""The name under which the score of the server's own model is recorded."""
LogFor = Callable[[str | None, str, Json], None]
"""Records a figure of a client, or of the run (None)."""


class ClientPart:
    """A client's side of the method, its messages' bytes and checks, and its evaluations.

    Every engine runs clients by this, so they compute and record the same wherever they are.
    """

    def __init__(
        self, config: RunConfig, base: Base, participant: Participant, log: LogFor
    ) -> None:
        self.config, self.participant, self.log = config, participant, log
        self.base = participant.base or base
        self.name = participant.name
        self.schema = config.method.schema()
        context = client_context(config, self.base, participant, partial(log, self.name))
        self.side = config.method.client(context)
        self.scores: dict[str, dict[str, Score]] = {}
        """By point (trained or aggregated) and text."""

    def hello(self) -> bytes:
        """What the server must know once."""
        return self.schema.send("hello", self.side.hello())

    def step(self, round: int, download: bytes) -> bytes:
        """One round of local work: the upload. The trained model is scored where that is due."""
        upload = self.schema.send("up", self.side.step(self._taken(download)))
        self.log(self.name, "bytes/up", len(upload))
        if due(self.config, round):
            self.score("trained")
        return upload

    def close(self, round: int, download: bytes) -> None:
        """Score the model as if the run ended with this round, and end if it does.

        `download` is what the server sends once the round is aggregated. A method that sends
        nothing down has the same model at both points.
        """
        if not self.schema.down:
            self._log_scores("aggregated", self.scores.get("trained") or self._scored())
            return
        last = round + 1 == self.config.rounds
        before = self.side.state()
        self.side.finish(self._taken(download))
        self.score("aggregated")
        if not (last and self.config.method.reports == "aggregated"):
            self.side.restore(before)

    def _taken(self, download: bytes) -> Message:
        self.log(self.name, "bytes/down", len(download))
        return self.schema.receive("down", download)

    def score(self, point: str) -> None:
        """Score the model on this client's held-out text."""
        self._log_scores(point, self._scored())

    def _scored(self) -> dict[str, Score]:
        return _scored(self.config, self.base, self.side.model(), self.participant)

    def _log_scores(self, point: str, scores: dict[str, Score]) -> None:
        self.scores[point] = scores
        for text, score in scores.items():
            self.log(text, f"test/{point}", score.as_dict())


def _scored(
    config: RunConfig, base: Base, model: PreTrainedModel, participant: Participant
) -> dict[str, Score]:
    """What a model scores on each held-out text of a participant."""
    window, evaluation = config.data.window, config.evaluation
    return {
        text: evaluate(base, model, tokens, window, evaluation.batch, evaluation.generate)
        for text, tokens in participant.tests.items()
    }


def score_server(
    config: RunConfig, server: ServerSide, own: Participant | None, round: int, log: LogFor
) -> None:
    """Score the server's own model after a round (0 is the first), if it has one and it is due."""
    if own is None or own.base is None or not due(config, round):
        return
    if (model := server.model()) is not None:
        for score in _scored(config, own.base, model, own).values():
            log(None, SERVER_SCORE, score.as_dict())


def due(config: RunConfig, round: int) -> bool:
    """Whether models are scored in a round (0 is the first): every so many, and in the last."""
    every = config.evaluation.every
    return round + 1 == config.rounds or (every is not None and (round + 1) % every == 0)


def result(config: RunConfig, folder: RunFolder) -> dict[str, object]:
    """The last scores per text, and what it took: from the metrics, to count all parts."""
    points: dict[str, dict[str, dict[str, float]]] = {"trained": {}, "aggregated": {}}
    traffic = {"bytes/up": 0, "bytes/down": 0}
    server: dict[str, dict[str, float]] = {}
    seconds = 0.0
    for line in folder.metrics():
        kind, _, point = line["name"].partition("/")
        if kind == "test" and point in points:
            points[point][line["client"]] = line["value"]
        elif line["name"] == SERVER_SCORE:
            server = {"server": line["value"]}
        elif line["name"] in traffic:
            traffic[line["name"]] += line["value"]
        elif line["name"] == "seconds":
            seconds += line["value"]
    return {
        "method": config.label,
        "reports": config.method.reports,
        **points,
        **server,
        "traffic": {"up": traffic["bytes/up"], "down": traffic["bytes/down"]},
        "seconds": round(seconds, 1),
    }

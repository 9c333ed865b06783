"""One client's part of a run: messages in and out as bytes, and what its model scores."""

from functools import partial
from typing import Protocol

from transformers import PreTrainedModel

from coterie.aggregation.mean import Aggregation, Contribution
from coterie.bases import Base
from coterie.config import RunConfig
from coterie.exchange import Json, Message, MessageError
from coterie.exchange.schema import Way
from coterie.federation import Participant, client_context, digest_of
from coterie.methods.contract import ServerSide
from coterie.runs import RunFolder
from coterie.scoring.evaluation import Score, evaluate

SERVER_SCORE = "server/aggregated"
"""The name under which the score of the server's own model is recorded."""


class LogFor(Protocol):
    """Records a figure of a client, or of the run (None); of the round in progress, or another."""

    def __call__(
        self, client: str | None, name: str, value: Json, round: int | None = None
    ) -> None:
        """See the class."""
        ...


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
        self.aggregation = Aggregation(config.aggregation, config.method.schema())
        self.schema = self.aggregation.schema
        context = client_context(config, self.base, participant, partial(log, self.name))
        self.side = config.method.client(context)
        self.scores: dict[str, dict[str, Score]] = {}
        """By point (trained or aggregated) and text."""

    def hello(self) -> bytes:
        """What the server must know once."""
        return self._sent("hello", self.side.hello())

    def step(self, round: int, download: bytes, *, counted: bool = True) -> bytes:
        """One round: take the download in, train, and return the upload.

        Models are scored where that is due: the aggregated one of the round before (if this
        client's upload `counted` then), and the trained one.
        """
        self._take(download)
        if counted and round and self.schema.down and due(self.config, round - 1):
            self._score("aggregated", round - 1)
        self.side.train(round)
        if due(self.config, round):
            self.score_trained(round)
        upload = self._sent("up", self.side.upload(round))
        self.log(self.name, "bytes/up", len(upload))
        return upload

    def finish(self, download: bytes) -> None:
        """After the last round: take the download in, score, and keep it if it is the result."""
        if not self.schema.down:
            return
        before = self.side.state() if self.config.method.reports == "trained" else None
        self._take(download)
        self._score("aggregated", self.config.rounds - 1)
        if before is not None:
            self.side.restore(before)

    def keep_items(self, folder: RunFolder) -> None:
        """Keep in this client's folder what each test window scored, where models were scored.

        It is neither logged nor sent.
        """
        for point, scores in self.scores.items():
            for text, score in scores.items():
                # Windows of the same length and the same text can be paired between runs.
                of = f"{digest_of([self.participant.tests[text]])}-{self.config.data.window}"
                folder.keep_items(point, text, {"of": of, **score.items()})

    def score_trained(self, round: int) -> None:
        """Score the model after a round's local work.

        A method that sends nothing down has the same model when the round is aggregated.
        """
        self._score("trained", round)
        if not self.schema.down:
            self._log_scores("aggregated", round, self.scores["trained"])

    def _take(self, download: bytes) -> None:
        self.log(self.name, "bytes/down", len(download))
        self.side.take(self.schema.receive("down", download))

    def _sent(self, way: Way, message: Message) -> bytes:
        """The bytes of a message, once it is sure that nothing in it is this client's alone."""
        parts, sends = self.side.parts(), self.config.method.sends
        for _, group, name, _ in message.tensors():
            if name in parts and not sends(parts[name]):
                raise MessageError(f"The tensor {name!r} of {group!r} must stay on its client.")
        tokens = len(self.participant.data.train.ids)
        return self.schema.send(way, self.aggregation.sent(message, tokens))

    def _score(self, point: str, round: int) -> None:
        """Score the model on this client's held-out text."""
        scores = _scored(self.config, self.base, self.side.model(), self.participant)
        self._log_scores(point, round, scores)

    def _log_scores(self, point: str, round: int, scores: dict[str, Score]) -> None:
        self.scores[point] = scores
        for text, score in scores.items():
            self.log(text, f"test/{point}", score.as_dict(), round)


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


def contribution(
    server: ServerSide, aggregation: Aggregation, name: str, upload: Message
) -> Contribution:
    """What an upload adds to the mean, once the server's side has taken the rest of it.

    Raises MessageError if it is not what it should be.
    """
    found = aggregation.contribution(name, upload, server.expects(name))
    server.receive(name, aggregation.each(upload))
    return found


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

"""The parts of a run: a client's and the server's, wherever each of them works."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from coterie.adapters.coverage import coverage
from coterie.aggregation.mean import Aggregation, Contribution, Rule, weighted_mean
from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.floor import FLOOR, floor_items
from coterie.errors import CoterieError, Diverged
from coterie.evaluation.evaluate import Score, evaluate
from coterie.federation.participants import (
    Participant,
    client_context,
    server_context,
    text_digest,
)
from coterie.inference.kept import Keeper, bring_back, compares_aggregated, stops
from coterie.inference.reference import with_reference
from coterie.messages import Message, MessageError, State
from coterie.messages import names as metric
from coterie.messages.message import is_finite
from coterie.messages.schema import Way
from coterie.methods.contract import ClientSide, ServerSide
from coterie.privacy.ledger import Ledger
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId

AT_THE_END = "it diverged on the last download, and keeps its model from before it"
"""The reason recorded for a client whose upload counted, but which diverged on the aggregate."""
JUMP = 1.0
"""Nats per token by which the validation loss exceeds the best so far when a client warns: far more
than over-fitting adds in a round, and less than a damaged shared model."""


class ClientPart:
    """A client's side of the method, its messages' bytes and checks, and its evaluations.

    Every engine runs clients by this, so they compute and record the same wherever they are.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participant: Participant,
        recorder: Recorder,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.log = config, recorder.log
        self.base = participant.base or base
        self.participant = participant = with_reference(config, self.base, participant)
        self.name = participant.name
        self.aggregation = Aggregation(config.aggregation, config.method.schema())
        self.schema = self.aggregation.schema
        log = partial(self.log, self.name)
        context = client_context(config, self.base, participant, log, ledger)
        self.side = config.method.client(context)
        self.keeper: Keeper | None = None
        """Where the best model is kept, of a side that learns."""
        if config.evaluation.keep == "best" and type(self.side).train is not ClientSide.train:
            self.keeper = Keeper(config, self.base, participant, self.side)
        self.compares_aggregated = compares_aggregated(config.method)
        self.scores: dict[str, dict[str, Score]] = {}
        """By point (trained or aggregated) and text."""

    @property
    def covered(self) -> tuple[str, ...]:
        """What of its base this client's adapter stands on, in lines; none without one."""
        return coverage(self.base.model, self.side.parts().values()).lines()

    def hello(self) -> bytes:
        """What the server must know once."""
        return self._sent("hello", self.side.hello())

    def step(self, round: int, download: bytes, *, counted: bool = True) -> bytes:
        """One round: take the download in, train, and return the upload.

        Models are scored where that is due: the aggregated one of the round before (if this
        client's upload `counted` then), and the trained one. Raises Diverged if the loss, a
        trained parameter or the upload is not finite.
        """
        if self.keeper is not None:
            self.keeper.begin(round)
        self._take(download)
        if round and self.compares_aggregated:
            self._compare(round)
        if counted and round and self.schema.down and due(self.config, round - 1):
            self._score("aggregated", round - 1)
        self.side.train(round)
        if not all(is_finite(part.parameter.detach()) for part in self.side.parts().values()):
            raise self._diverged("A parameter", round)
        if not self.compares_aggregated:
            self._compare(round + 1)
        if due(self.config, round):
            self.score_trained(round)
        message = self.side.upload(round)
        if not message.is_finite():
            raise self._diverged("The upload", round)
        upload = self._sent("up", message)
        self.log(self.name, metric.BYTES_UP, len(upload))
        return upload

    def finish(
        self, download: bytes, kept: State | None, round: int, *, counted: bool = True
    ) -> None:
        """After the last round: take the download in, score, and keep it if it is the result.

        Then score the best model, unless it is that of the last round; `kept` is what the newest
        checkpoint has of it. `counted`: whether this client's upload did in the last round.
        """
        if self.keeper is not None:
            self.keeper.begin(round + 1)  # it may have come when all rounds were over
        if self.stops(round) or not counted or not due(self.config, round):
            self.score_trained(round)  # nobody has
        if self.schema.down:
            trained = self.side.state()
            try:
                self._take(download)
            except Diverged:
                self.side.restore(trained)
                self.log(self.name, metric.LEFT_OUT, AT_THE_END)
            if self.compares_aggregated and not self.stops(round + 1):
                self._compare(round + 1)
            self._score("aggregated", round)
            if self.config.method.reports != "aggregated":
                self.side.restore(trained)
        if self.keeper is not None:
            self._score_kept(self.keeper.found or kept, round + 1)

    def _diverged(self, what: str, round: int) -> Diverged:
        return Diverged(
            f"{what} of {self.name!r} is not finite in round {round + 1}; a lower "
            "training.learning_rate may help."
        )

    def stops(self, rounds: int) -> bool:
        """Whether this client takes no part in rounds after so many."""
        return self.keeper is not None and stops(self.config, self.keeper.best, rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """What a checkpoint has of this client, by file; None: as the one before it."""
        yield f"client-{self.name}", self.side.state()
        if self.keeper is not None and self.keeper.best is not None:
            yield f"kept-{self.name}", self.keeper.found
            self.keeper.found = None

    def restore(self, state: State, kept: State | None) -> None:
        """Go back to a checkpoint: the client's state, and what it has of the best model."""
        self.side.restore(state)
        if self.keeper is not None:
            self.keeper.restore(kept)

    def keep_items(self, folder: RunFolder) -> None:
        """Keep in this client's folder what each test window scored, where models were scored, and
        what the commonest answer scores.

        It is neither logged nor sent.
        """
        for point, scores in self.scores.items():
            for text, score in scores.items():
                of = text_digest(self.participant.tests[text], self.config.data.window)
                folder.keep_items(point, text, {"of": of, **score.items()})
        if self.scores:
            for text, scored in floor_items(self.config, self.participant).items():
                folder.keep_items(FLOOR, text, scored)

    def score_trained(self, round: int) -> None:
        """Score the model after a round's local work.

        A method that sends nothing down has the same model when the round is aggregated.
        """
        self._score("trained", round)
        if not self.schema.down:
            self._log_scores("aggregated", round, self.scores["trained"])

    def _compare(self, rounds: int) -> None:
        if self.keeper is not None:
            assert self.keeper.best is not None, "begin() comes first"
            best = self.keeper.best.loss
            found = self.keeper.compare(rounds)
            self.log(self.name, metric.VALIDATION_LOSS, found.loss, rounds - 1)
            if self.schema.down and found.loss > best + JUMP:
                jump = {"round": rounds, "loss": found.loss, "best": best}
                self.log(self.name, metric.JUMPED, jump, rounds - 1)
            if found.accuracy is not None:
                self.log(self.name, metric.VALIDATION_ACCURACY, found.accuracy, rounds - 1)

    def _score_kept(self, kept: State | None, rounds: int) -> None:
        """Say which model is the best, and score it if nobody has; the side stays as it is."""
        assert kept is not None, "it is in the newest checkpoint, or was found since"
        self.log(self.name, metric.KEPT, kept.values["round"])
        if kept.values["round"] == rounds:
            return
        now = self.side.state()
        model = bring_back(self.base, self.side, kept)()
        scores = _scored(self.config, self.base, model, self.participant)
        self.scores[self.config.method.reports] = scores
        for text, score in scores.items():
            self.log(text, metric.KEPT_SCORE, score.as_dict())
        self.side.restore(now)

    def _take(self, download: bytes) -> None:
        self.log(self.name, metric.BYTES_DOWN, len(download))
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
            self.log(text, f"{metric.TEST}{point}", score.as_dict(), round)


def _scored(
    config: RunConfig, base: Base, model: PreTrainedModel, participant: Participant
) -> dict[str, Score]:
    """What a model scores on each held-out text of a participant."""
    window, evaluation = config.data.window, config.evaluation
    return {
        text: evaluate(
            base, model, tokens, window, evaluation.batch, evaluation.generate, evaluation.metric
        )
        for text, tokens in participant.tests.items()
    }


class ServerPart:
    """The server's side of the method, its messages' bytes and checks, and its checkpoints.

    Whoever leads the rounds of a run is one.

    Args:
        config: the run.
        base: the run's base, perhaps without weights.
        clients: the names of the clients.
        own: what a server with a model of its own holds.
        folder: the run's folder.
        recorder: records figures.
        rule: what makes one of many uploads.
    """

    def __init__(
        self,
        config: RunConfig,
        base: nn.Module,
        clients: Sequence[ClientId],
        own: Participant | None,
        folder: RunFolder,
        recorder: Recorder,
        rule: Rule = weighted_mean,
    ) -> None:
        self.config, self.own, self.folder, self.recorder = config, own, folder, recorder
        self.aggregation = Aggregation(config.aggregation, config.method.schema(), rule)
        self.schema = self.aggregation.schema
        log = partial(recorder.log, None)
        self.server = config.method.server(server_context(config, base, clients, own, log))

    def join(self, name: ClientId, hello: Message) -> None:
        """Let a client take part for which the server's side is prepared."""
        self.aggregation.join(name, hello)
        self.server.join(name, hello)

    def download(self, name: ClientId) -> bytes:
        """Return what the server sends to a client now."""
        return self.schema.send("down", self.server.download(name))

    def close(self, mean: Message) -> None:
        """End a round that counts, with the mean of its uploads.

        Raises CoterieError, before anything is saved, if what comes of it cannot be computed with.
        """
        unusable = CoterieError(
            f"The aggregate of round {self.server.round + 1} is not finite, and has not been "
            "saved; see which client's upload is too large, and continue without it, or from an "
            "earlier round."
        )
        try:
            self.server.close(self.aggregation.stepped(mean, self.server.averaged()))
            finite = all(state.is_finite() for _, state in self.states())
        except (ArithmeticError, RuntimeError) as error:  # torch's linear algebra raises such
            raise unusable from error
        if not finite:
            raise unusable

    def score(self, round: int, *, last: bool = False) -> None:
        """Score the server's own model after a round (0 is the first), if it has one and it is due.

        last: whether the run ends with the round, maybe early.
        """
        own = self.own
        if own is None or own.base is None or not (last or due(self.config, round)):
            return
        if (model := self.server.model()) is not None:
            for score in _scored(self.config, own.base, model, own).values():
                self.recorder.log(None, metric.SERVER_SCORE, score.as_dict())

    def states(self) -> Iterator[tuple[str, State]]:
        """Yield what the server must keep of a round, by the names in a checkpoint."""
        yield "server", self.server.state()
        if self.aggregation.optimiser is not None:
            yield "optimiser", self.aggregation.optimiser.state()

    def restore(self) -> None:
        """Take the server back to the newest checkpoint."""
        self.server.restore(self.folder.load("server"))
        if self.aggregation.optimiser is not None:
            self.aggregation.optimiser.restore(self.folder.load("optimiser"))


def contribution(
    server: ServerSide, aggregation: Aggregation, name: str, upload: Message
) -> Contribution:
    """What an upload adds to the mean, once the server's side has taken the rest of it.

    Raises MessageError if it is not what it should be.
    """
    upload = aggregation.bounded(name, upload, server.reference)
    found = aggregation.contribution(name, upload, server.expects(name))
    server.receive(name, aggregation.each(upload))
    return found


def due(config: RunConfig, round: int) -> bool:
    """Whether models are scored in a round (0 is the first): every so many, and in the last."""
    every = config.evaluation.every
    return round + 1 == config.exchanges or (every is not None and (round + 1) % every == 0)


def result(config: RunConfig, folder: RunFolder) -> dict[str, object]:
    """The last scores per text, and what it took: from the metrics, to count all parts.

    Where clients keep their best models, what the method reports are the scores of these; `kept`
    says of how many rounds each client's is. `left_out` has the rounds in which an upload did not
    count, by client, and why.
    """
    last: dict[str, dict[str | None, Any]] = defaultdict(dict)
    left_out: dict[str, dict[int, str]] = {}
    total = {metric.BYTES_UP: 0, metric.BYTES_DOWN: 0, metric.SECONDS: 0.0}
    for line in folder.metrics():
        name, client, value = line["name"], line["client"], line["value"]
        last[name][client] = value
        if name in total:
            total[name] += value
        elif name == metric.LEFT_OUT:
            left_out.setdefault(client, {})[line["round"] + 1] = value
    reports, kept = config.method.reports, last[metric.KEPT]
    points = {point: last[f"{metric.TEST}{point}"] for point in ("trained", "aggregated")}
    points[reports] |= last[metric.KEPT_SCORE]
    return {
        "method": config.label,
        "reports": reports,
        **({"kept": kept} if kept else {}),
        **({"left_out": left_out} if left_out else {}),
        **points,
        **({"server": server} if (server := last[metric.SERVER_SCORE].get(None)) else {}),
        "traffic": {"up": total[metric.BYTES_UP], "down": total[metric.BYTES_DOWN]},
        "seconds": round(total[metric.SECONDS], 1),
    }

"""A client's part of a run, wherever it works, and the result of a run."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from coterie.adapters.coverage import coverage
from coterie.aggregation.ends import ClientTransforms
from coterie.aggregation.transform import TRAIN
from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.floor import FLOOR, floor_items
from coterie.errors import Diverged
from coterie.evaluation.evaluate import Score, evaluate
from coterie.federation.participants import (
    Participant,
    client_context,
    text_digest,
)
from coterie.inference.kept import Keeper, bring_back, compares_aggregated, stops
from coterie.inference.reference import with_reference
from coterie.messages import Message, MessageError, State
from coterie.messages import names as metric
from coterie.messages.message import is_finite
from coterie.messages.schema import Way
from coterie.methods.contract import ClientSide
from coterie.privacy.ledger import Ledger
from coterie.runs import Recorder, RunFolder

AT_THE_END = "it diverged on the last download, and keeps its model from before it"
"""The reason recorded for a client whose upload counted, but which diverged on the aggregate."""
TRANSFORMS = "transforms"
"""The name of what transforms remember, in states."""
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
        self.aggregation = config.aggregating()
        self.schema = self.aggregation.schema
        log = partial(self.log, self.name)
        ledger = ledger or Ledger()
        self.transforms = ClientTransforms(self.aggregation.pipeline, self.name, ledger)
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
        return coverage(self.base.model, self.side.parameters().values()).lines()

    def hello(self) -> bytes:
        """What the server must know once."""
        return self._sent("hello", self.side.hello())

    def step(self, exchange: int, download: bytes, *, counted: bool = True) -> bytes:
        """Carry out an exchange: receive the download, train, and return the upload.

        Models are scored where that is due: the aggregated one of the round before (if this
        client's upload `counted` then), and the trained one.

        Raises:
            Diverged: the loss, a trained parameter or the upload is not finite.
        """
        round, phase = self.config.turn(exchange)
        if phase != TRAIN:
            return self._answer(phase, exchange, download)
        if self.keeper is not None:
            self.keeper.begin(round)
        self._take(download)
        if round and self.compares_aggregated:
            self._compare(round)
        if counted and round and self.schema.down and due(self.config, round - 1):
            self._score("aggregated", round - 1)
        self.side.train(round)
        if not all(is_finite(p.tensor.detach()) for p in self.side.parameters().values()):
            raise self._diverged("A parameter", round)
        if not self.compares_aggregated:
            self._compare(round + 1)
        if due(self.config, round):
            self.score_trained(round)
        message = self.side.upload(round)
        if not message.is_finite():
            raise self._diverged("The upload", round)
        upload = self._sent("up", message, exchange)
        self.log(self.name, metric.BYTES_UP, len(upload))
        return upload

    def _answer(self, phase: str, exchange: int, download: bytes) -> bytes:
        """Carry out an exchange that a transform needs before training."""
        self.log(self.name, metric.BYTES_DOWN, len(download))
        self.transforms.receive(self.schema.receive("down", download), exchange)
        upload = self.schema.send("up", self.transforms.answer(phase, exchange))
        self.log(self.name, metric.BYTES_UP, len(upload))
        return upload

    def finish(
        self, download: bytes, kept: State | None, exchange: int, *, counted: bool = True
    ) -> None:
        """After the last round: take the download in, score, and keep it if it is the result.

        Then score the best model, unless it is that of the last round; `kept` is what the newest
        checkpoint has of it. `counted`: whether this client's upload did in the last round.
        """
        round, _ = self.config.turn(exchange)
        if self.keeper is not None:
            self.keeper.begin(round + 1)  # it may have come when all rounds were over
        if self._stops(round) or not counted or not due(self.config, round):
            self.score_trained(round)  # nobody has
        if self.schema.down:
            trained = self.side.state()
            try:
                self._take(download)
            except Diverged:
                self.side.restore(trained)
                self.log(self.name, metric.LEFT_OUT, AT_THE_END)
            if self.compares_aggregated and not self._stops(round + 1):
                self._compare(round + 1)
            self._score("aggregated", round)
            if self.config.method.reports != "aggregated":
                self.side.restore(trained)
        if self.keeper is not None:
            self._score_kept(self.keeper.unsaved or kept, round + 1)

    def _diverged(self, what: str, round: int) -> Diverged:
        return Diverged(
            f"{what} of {self.name!r} is not finite in round {round + 1}; a lower "
            "training.learning_rate may help."
        )

    def stops(self, exchanges: int) -> bool:
        """Return whether this client takes no part in rounds after so many exchanges."""
        return self._stops(self.config.turn(exchanges)[0])

    def _stops(self, rounds: int) -> bool:
        return self.keeper is not None and stops(self.config, self.keeper.best, rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """What a checkpoint has of this client, by file; None: as the one before it."""
        state = self.side.state()
        if self.transforms.remembers:
            state = replace(state, parts={**state.parts, TRANSFORMS: self.transforms.state()})
        yield f"client-{self.name}", state
        if self.keeper is not None and self.keeper.best is not None:
            yield f"kept-{self.name}", self.keeper.unsaved
            self.keeper.unsaved = None

    def restore(self, state: State, kept: State | None) -> None:
        """Go back to a checkpoint: the client's state, and what it has of the best model."""
        self.side.restore(state)
        if TRANSFORMS in state.parts:
            self.transforms.restore(state.parts[TRANSFORMS])
        if self.keeper is not None:
            self.keeper.restore(kept)

    def keep_items(self, folder: RunFolder) -> None:
        """Write the scores of all test items, and of the commonest answer, to the client's folder.

        They are neither logged nor sent. Nothing is written if no model was scored.

        Args:
            folder: The client's folder.
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
        scores = scored(self.config, self.base, model, self.participant)
        self.scores[self.config.method.reports] = scores
        for text, score in scores.items():
            self.log(text, metric.KEPT_SCORE, score.as_dict())
        self.side.restore(now)

    def _take(self, download: bytes) -> None:
        self.log(self.name, metric.BYTES_DOWN, len(download))
        message = self.schema.receive("down", download)
        self.side.receive(self.transforms.receive(message, message.round))

    def _sent(self, way: Way, message: Message, exchange: int = 0) -> bytes:
        """The bytes of a message, once it is sure that nothing in it is this client's alone."""
        parameters, shared = self.side.parameters(), self.config.method.shared
        for _, group, name, _ in message.tensors():
            if name in parameters and not shared(parameters[name]):
                raise MessageError(f"The tensor {name!r} of {group!r} must stay on its client.")
        tokens = len(self.participant.data.train.ids)
        message = self.transforms.declared(message, tokens)
        if way == "up":
            message = self.transforms.send(message, exchange)
        return self.schema.send(way, message)

    def _score(self, point: str, round: int) -> None:
        """Score the model on this client's held-out text."""
        scores = scored(self.config, self.base, self.side.model(), self.participant)
        self._log_scores(point, round, scores)

    def _log_scores(self, point: str, round: int, scores: dict[str, Score]) -> None:
        self.scores[point] = scores
        for text, score in scores.items():
            self.log(text, f"{metric.TEST}{point}", score.as_dict(), round)


def scored(
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


def due(config: RunConfig, round: int) -> bool:
    """Return whether models are scored in a round (0 is the first): every so many, and the last."""
    every = config.evaluation.every
    return round + 1 == config.method.exchanges(config.rounds) or (
        every is not None and (round + 1) % every == 0
    )


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

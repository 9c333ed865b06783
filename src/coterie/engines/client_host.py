"""A client's part of a run, independent of the engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from transformers import PreTrainedModel

from coterie.adapters.coverage import coverage
from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.floor import FLOOR, floor_items
from coterie.engines.memory import EVALUATION, memory_for
from coterie.errors import Diverged
from coterie.evaluation.evaluate import Score, evaluate
from coterie.evaluation.gate import GATE
from coterie.exchanges.codec import ClientTransforms
from coterie.exchanges.weights import with_tokens
from coterie.federation.participants import (
    Participant,
    client_context,
    text_digest,
)
from coterie.federation.pipeline import pipeline_of
from coterie.inference.general import gated_drift, with_general
from coterie.inference.kept import Keeper, bring_back, compares_aggregated, stops
from coterie.inference.reference import with_reference
from coterie.messages import Json, Message, MessageError, State
from coterie.messages import names as metric
from coterie.messages.host import are_finite
from coterie.messages.schema import Way
from coterie.methods.contract import ClientSide
from coterie.privacy.ledger import Ledger
from coterie.runs import Recorder
from coterie.turn import FIRST, TRAIN, Turn

AT_THE_END = "the client diverged while applying the last download, and kept its previous model"
"""The reason that is recorded for a client that diverged while applying the last download.

The client's last upload was accepted nevertheless."""
TRANSFORMS = "transforms"
"""The name of the transforms' state in checkpoints."""
JUMP = 1.0
"""The largest increase over the best validation loss that causes no warning, in nats per token.

In one round, over-fitting increases the loss by far less, and a damaged shared model increases it
by more."""


class ClientHost:
    """A client's part of a run: the method's client-side object, messages, transforms and scores.

    All engines and deployments use this class, so their results and metrics are the same.

    Args:
        config: The run.
        base: The run's base, which is used if the participant has no base of its own.
        participant: The client's data.
        recorder: The recorder of metrics.
        ledger: The ledger of the client's privacy budget; None: an empty ledger in memory.
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
        self.name = participant.name
        with self._memory_for(EVALUATION):
            participant = with_reference(config, self.base, participant)
            self.participant = participant = with_general(config, self.base, participant)
        self.pipeline = pipeline_of(config)
        self.schema = self.pipeline.schema
        log = partial(self.log, self.name)
        ledger = ledger or Ledger()
        self.transforms = ClientTransforms(self.pipeline, self.name, ledger)
        context = client_context(config, self.base, participant, log, ledger)
        with self._memory_for("the adapter"):
            self.side = config.method.client(context)
        self.keeper: Keeper | None = None
        """The client's best model; None if `evaluation.keep` is not `best`, or if the method's
        clients do not train."""
        if config.evaluation.keep == "best" and type(self.side).train is not ClientSide.train:
            self.keeper = Keeper(config, self.base, participant, self.side)
        self.compares_aggregated = compares_aggregated(config.method)
        self.scores: dict[str, dict[str, Score]] = {}
        """The last scores. The first key is `trained` (the model after local training) or
        `aggregated` (the model after the download). The second key is the name of the test text."""

    def _memory_for(self, task: str) -> AbstractContextManager[None]:
        return memory_for(task, self.config, self.name)

    @property
    def covered(self) -> tuple[str, ...]:
        """Descriptions of the layers that the adapter modifies; empty if there is no adapter."""
        return coverage(self.base.model, self.side.parameters().values()).lines()

    def hello(self) -> bytes:
        """Return the client's serialised first message."""
        return self._serialise("hello", self.side.hello())

    def step(self, turn: Turn, download: bytes, *, counted: bool = True) -> bytes:
        """Execute a turn: apply the download, train, and return the upload.

        If evaluation is due, the aggregated model of the previous round and the trained model are
        scored.

        Args:
            turn: The turn.
            download: The serialised download.
            counted: Whether the client's last upload was accepted. If not, the aggregated model is
                not scored.

        Returns:
            The serialised upload.

        Raises:
            Diverged: If the loss, a trained parameter or the upload is not finite.
        """
        if turn.phase != TRAIN:
            return self._answer(turn, download)
        round, follows = turn.round, turn.first and turn.round > 0
        if self.keeper is not None:
            with self._memory_for(EVALUATION):
                self.keeper.begin(round)
        self._apply(download, turn)
        if follows and self.compares_aggregated:
            self._compare(round)
        if follows and counted and self.schema.down and due(self.config, round - 1):
            self._score("aggregated", round - 1)
        with self._memory_for("the local training"):
            self.side.train(turn)
        if not are_finite(p.tensor for p in self.side.parameters().values()):
            raise self._diverged("A parameter", round)
        if turn.last and not self.compares_aggregated:
            self._compare(round + 1)
        if turn.last and due(self.config, round):
            self.score_trained(round)
        with self._memory_for("an upload"):
            message = self.upload(turn)
        if not message.is_finite():
            raise self._diverged("The upload", round)
        upload = self._serialise("up", message, turn)
        self.log(self.name, metric.BYTES_UP, len(upload))
        return upload

    def upload(self, turn: Turn) -> Message:
        """Return the method's upload of an exchange, copied to the CPU."""
        return self.side.upload(turn).on_host()

    def _answer(self, turn: Turn, download: bytes) -> bytes:
        """Apply a download and return the client's upload, in a phase without training.

        Every phase without training was added to the run by an aggregation transform.
        """
        self.log(self.name, metric.BYTES_DOWN, len(download))
        self.transforms.receive(self.schema.receive("down", download), turn)
        upload = self.schema.send("up", self.transforms.answer(turn))
        self.log(self.name, metric.BYTES_UP, len(upload))
        return upload

    def finish(
        self, download: bytes, kept: State | None, turn: Turn, *, counted: bool = True
    ) -> None:
        """Apply the download after the last round; score the aggregated model and the best model.

        The trained model is scored first, unless it has been scored already. After the call, the
        client has the aggregated model if `Method.reports` is `aggregated`, and the trained model
        otherwise. The best model is restored only while it is scored.

        Args:
            download: The serialised download.
            kept: The newest saved state of the best model; None if there is none.
            turn: The last turn.
            counted: Whether the client's upload in the last exchange was accepted.
        """
        round, was_scored = turn.round, turn.last and due(self.config, turn.round)
        if self.keeper is not None:
            self.keeper.begin(round + 1)  # the client may have joined after the last round
        if self.stops(round) or not counted or not was_scored:
            self.score_trained(round)  # not scored yet
        elif "trained" not in self.scores:  # scored and logged before this process started
            points = ("trained",) if self.schema.down else ("trained", "aggregated")
            self.scores |= dict.fromkeys(points, self._scored())
        if self.schema.down:
            trained = self.side.state()
            try:
                self._apply(download, replace(turn, number=turn.number + 1, phase=TRAIN))
            except Diverged:
                self.side.restore(trained)
                self.log(self.name, metric.LEFT_OUT, AT_THE_END)
            if self.compares_aggregated and not self.stops(round + 1):
                self._compare(round + 1)
            self._score("aggregated", round)
            if self.config.method.reports != "aggregated":
                self.side.restore(trained)
        if self.keeper is not None:
            self._score_kept(self.keeper.unsaved or kept, round + 1)

    def _diverged(self, subject: str, round: int) -> Diverged:
        return Diverged(
            f"{subject} of {self.name!r} is not finite in round {round + 1}; a lower "
            "training.learning_rate may help."
        )

    def stops(self, rounds: int) -> bool:
        """Return whether the client stops training early.

        Args:
            rounds: The number of complete rounds.
        """
        return self.keeper is not None and stops(self.config, self.keeper.best, rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """Yield the client's states, which the caller saves.

        Yields:
            Pairs of a file's name and a state. The state is None if it has not changed since it was
            last saved.
        """
        state = self.side.state()
        if self.transforms.remembers:
            state = replace(state, parts={**state.parts, TRANSFORMS: self.transforms.state()})
        if (gate := self.participant.gate) is not None:
            state = replace(state, parts={**state.parts, GATE: gate.state()})
        yield f"client-{self.name}", state
        if self.keeper is not None and self.keeper.best is not None:
            yield f"kept-{self.name}", self.keeper.unsaved
            self.keeper.unsaved = None

    def restore(self, state: State, kept: State | None) -> None:
        """Restore a checkpoint.

        Args:
            state: The client's state.
            kept: The state of the client's best model; None if there is none.
        """
        self.side.restore(state)
        if TRANSFORMS in state.parts:
            self.transforms.restore(state.parts[TRANSFORMS])
        if self.keeper is not None:
            self.keeper.restore(kept)

    def keep_items(self, keep: Callable[[str, str, Mapping[str, Json]], object]) -> None:
        """Keep the model's scores for all test samples.

        The scores that the commonest answer would get for these samples are also kept. The
        scores for samples are neither logged nor sent. If no model was scored, nothing is kept.

        Args:
            keep: A function like `RunFolder.keep_items`.
        """
        for point, scores in self.scores.items():
            for text, score in scores.items():
                of = text_digest(self.participant.tests[text], self.config.data.window)
                keep(point, text, {"of": of, **score.items()})
        if self.scores:
            for text, scored in floor_items(self.config, self.participant).items():
                keep(FLOOR, text, scored)

    def score_trained(self, round: int) -> None:
        """Score the model after local training.

        If the method has no downloads, the scores are also recorded as the scores of the
        aggregated model, because both models are the same.

        Args:
            round: The number of the round; the first is 0.
        """
        self._score("trained", round)
        if not self.schema.down:
            self._log_scores("aggregated", round, self.scores["trained"])

    def _compare(self, rounds: int) -> None:
        if self.keeper is not None:
            assert self.keeper.best is not None, "call begin() first"
            best = self.keeper.best.loss
            with self._memory_for(EVALUATION):
                current = self.keeper.compare(rounds)
            self.log(self.name, metric.VALIDATION_LOSS, current.loss, rounds - 1)
            if self.schema.down and current.loss > best + JUMP:
                jump = {"round": rounds, "loss": current.loss, "best": best}
                self.log(self.name, metric.JUMPED, jump, rounds - 1)
            if current.accuracy is not None:
                self.log(self.name, metric.VALIDATION_ACCURACY, current.accuracy, rounds - 1)

    def _score_kept(self, kept: State | None, rounds: int) -> None:
        """Record the number of rounds after which the client had its best model; score this model.

        The last model is not scored again if it is the best model. The client has the same state
        before and after the call.

        Args:
            kept: The state of the best model.
            rounds: The number of complete rounds.
        """
        assert kept is not None, "the best model is neither in memory nor on disk"
        self.log(self.name, metric.KEPT, kept.values["round"])
        if kept.values["round"] == rounds:
            return
        current = self.side.state()
        model = bring_back(self.base, self.side, kept)()
        scores = scored(self.config, self.base, model, self.participant)
        self.scores[self.config.method.reports] = scores
        for text, score in scores.items():
            self.log(text, metric.KEPT_SCORE, score.as_dict())
        self._log_drift(model, rounds - 1)
        self.side.restore(current)

    def _apply(self, download: bytes, turn: Turn) -> None:
        self.log(self.name, metric.BYTES_DOWN, len(download))
        with self._memory_for("a download"):
            message = self.schema.receive("down", download)
            self.side.receive(self.transforms.receive(message, turn))

    def _serialise(self, way: Way, message: Message, turn: Turn = FIRST) -> bytes:
        """Check that a message contains no private parameters; then transform and serialise it."""
        parameters, shared = self.side.parameters(), self.config.method.shared
        for _, group, name, _ in message.tensors():
            if name in parameters and not shared(parameters[name]):
                raise MessageError(
                    f"The tensor {name!r} of the group {group!r} must stay on its client."
                )
        if self.pipeline.weighted:
            message = with_tokens(message, len(self.participant.data.train.ids))
        if way == "up":
            message = self.transforms.send(message, turn)
        return self.schema.send(way, message)

    def _score(self, point: str, round: int) -> None:
        """Score the client's current model on its test texts, and log the scores.

        Args:
            point: The name under which the scores are logged: `trained` or `aggregated`.
            round: The number of the round; the first is 0.
        """
        self._log_scores(point, round, self._scored())
        if point == self.config.method.reports or not self.schema.down:
            self._log_drift(self.side.model(), round)

    def _log_drift(self, model: PreTrainedModel, round: int) -> None:
        if (held_out := self.participant.held_out) is not None:
            drift = gated_drift(self.participant.gate, self.base, model, held_out)
            self.log(self.name, metric.DRIFT, drift, round)

    def _scored(self) -> dict[str, Score]:
        """Score the client's current model on its test texts."""
        return scored(self.config, self.base, self.side.model(), self.participant)

    def _log_scores(self, point: str, round: int, scores: dict[str, Score]) -> None:
        self.scores[point] = scores
        for text, score in scores.items():
            self.log(text, f"{metric.TEST}{point}", score.as_dict(), round)


def scored(
    config: RunConfig, base: Base, model: PreTrainedModel, participant: Participant
) -> dict[str, Score]:
    """Score a model on the test texts of a participant.

    Returns:
        A mapping from the name of each test text to the scores.
    """
    window, evaluation = config.data.window, config.evaluation
    options = evaluation.batch, evaluation.generate, evaluation.metric, participant.gate
    with memory_for(EVALUATION, config, participant.name):
        return {
            text: evaluate(base, model, tokens, window, *options)
            for text, tokens in participant.tests.items()
        }


def due(config: RunConfig, round: int) -> bool:
    """Return whether evaluation is due in a round.

    Evaluation is due every `evaluation.every` rounds, and in the last round.

    Args:
        config: The run.
        round: The number of the round; the first is 0.
    """
    every = config.evaluation.every
    return round + 1 == config.rounds or (every is not None and (round + 1) % every == 0)

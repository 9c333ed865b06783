"""The best model of a client, chosen by the score on the client's own validation text.

With every engine, the client itself makes the choice, and does not send it to the server. Besides
the current state of each client, a checkpoint contains a state `kept-NAME`, where NAME is the
client's name. This kept state holds the round of the client's best model so far, the model's
scores, and the client's state in that round, without the states of the optimisers. The client's
state is missing if the best model is the untrained base.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.evaluation.evaluate import evaluate
from coterie.federation.participants import Participant, text_digest
from coterie.messages import State
from coterie.methods.contract import ClientSide, Method
from coterie.methods.pretrained import bare
from coterie.training.local import without_training
from coterie.training.spec import DPOSpec

SIDE = "side"
"""Name of the nested state, in a kept state, that holds the state of the client's method object."""


@dataclass(frozen=True)
class Best:
    """The best model of a client so far, with its scores on validation text."""

    round: int
    """The number of rounds that were complete when the client had this model.

    The number is 0 for the untrained base.
    """
    loss: float
    """The mean loss of the validation samples in nats per token.

    If samples have answers, the mean is over the tokens of the answers only. For preference pairs,
    this is the loss that training minimises, such as the loss of DPO.
    """
    accuracy: float | None
    """The share of correctly answered multiple-choice questions or correctly ranked pairs.

    None if the validation text contains neither.
    """
    since: int
    """The number of rounds that were complete when this model became the best.

    It is equal to `round`, except for the untrained base, which is the best model from the time at
    which the client joins.
    """
    forgotten: float = 0.0
    """The drift of the model, multiplied by `training.replay.weight`; 0 without replay."""

    def order(self) -> tuple[float, float]:
        """Return a sort key; the better of two models has the smaller key.

        Returns:
            The negated accuracy, or 0 if the accuracy is None; and the sum that training
            minimises (the loss and, with replay, the weighted drift), which decides between models
            of equal accuracy.
        """
        return -(self.accuracy or 0.0), self.loss + self.forgotten


_untrained: WeakKeyDictionary[PreTrainedModel, dict[object, Best]] = WeakKeyDictionary()
"""The scores of untrained bases, because a method and its baselines all begin with the same base.

The keys are the bases' models. The keys of an inner mapping identify a validation text and the
settings with which it is scored."""


class Keeper:
    """A selector of a client's best model.

    The candidates are the untrained base and the client's model after each round.

    Args:
        config: The run's configuration.
        base: The client's base.
        participant: The client's data; only the validation text and the general samples are used.
        side: The client's method object, which provides the current model.
    """

    def __init__(
        self, config: RunConfig, base: Base, participant: Participant, side: ClientSide
    ) -> None:
        self.base, self.side, self.batch = base, side, config.evaluation.batch
        validation, limit = participant.data.validation, config.evaluation.validation_samples
        self.replay, self.held_out = participant.replay, participant.held_out
        self.window = config.data.window
        self.samples = validation.few(limit, self.window, base.context_token)
        dpo = config.training.dpo or DPOSpec()
        referenced = config.data.declared.referenced
        self.is_reference = referenced and dpo.reference == "base"
        """Whether the untrained base is the reference model of DPO."""
        key = type(validation), text_digest(validation, self.window), limit, self.batch
        self._key = None if referenced else (*key, base.precision)
        self.best: Best | None = None
        """The best model so far; None before the client's first round."""
        self.unsaved: State | None = None
        """The new kept state; None if the best model has not changed since it was last saved."""

    def begin(self, rounds: int) -> None:
        """Record the untrained base as the best model, unless a best model is already recorded.

        Args:
            rounds: The number of complete rounds.
        """
        if self.best is None:
            if self.is_reference:  # all margins are exactly 0; computed ones have rounding errors
                self._keep(Best(0, math.log(2), 0.5, rounds))
            else:
                self._keep(replace(self._base_score(), since=rounds))

    def compare(self, rounds: int) -> Best:
        """Score the client's current model, and record it if it is the best so far.

        Args:
            rounds: The number of complete rounds.

        Returns:
            The scores of the current model.
        """
        assert self.best is not None, "begin() comes first"
        model = self.side.model()
        current = self._scored(model, rounds, rounds)
        if self.replay is not None and self.held_out is not None:
            drift = self.replay.spec.weight * self.held_out.drift(self.base, model)
            current = replace(current, forgotten=drift)
        if current.order() < self.best.order():
            self._keep(current, {SIDE: without_training(self.side.state())})
        return current

    def _base_score(self) -> Best:
        """Score the untrained base; return the earlier score if the text was scored before."""
        # With a reference model, the loss also depends on that model.
        scores = {} if self._key is None else _untrained.setdefault(self.base.model, {})
        if self._key not in scores:
            scores[self._key] = self._scored(bare(self.base), 0, 0)
        return scores[self._key]

    def _keep(self, best: Best, parts: dict[str, State] | None = None) -> None:
        self.best, self.unsaved = best, State(values=asdict(best), parts=parts or {})

    def _scored(self, model: PreTrainedModel, round: int, since: int) -> Best:
        score = evaluate(self.base, model, self.samples, self.window, self.batch)
        loss = score.loss if score.learnt is None else score.learnt
        accuracy = score.figures.get("reward_accuracy", score.figures.get("accuracy"))
        if not math.isfinite(loss):  # ranks last
            loss, accuracy = sys.float_info.max, None if accuracy is None else -1.0
        return Best(round, loss, accuracy, since)

    def restore(self, kept: State | None) -> None:
        """Restore the best model from a checkpoint.

        Args:
            kept: The client's kept state, called `kept-NAME` in a checkpoint; None before the
                client's first round.
        """
        self.best, self.unsaved = best_of(kept), None


def best_of(kept: State | None) -> Best | None:
    """Return the scores and the round of a client's best model.

    Args:
        kept: The client's kept state, called `kept-NAME` in a checkpoint; None before the
            client's first round.

    Returns:
        The scores and the round; None before the client's first round.
    """
    return None if kept is None else Best(**kept.values)


def compares_aggregated(method: Method) -> bool:
    """Return whether clients score their models after a download rather than after local training.

    Args:
        method: The run's method.
    """
    return method.reports == "aggregated" and bool(method.schema().down)


def stops(config: RunConfig, best: Best | None, rounds: int) -> bool:
    """Return whether a client stops training.

    A client stops if its model has not improved in the last `evaluation.patience` rounds. If models
    are scored after a download, the last complete round is not counted, because the model that
    results from this round is scored only after the next download.

    Args:
        config: The run's configuration.
        best: The client's best model so far; None before the client's first round.
        rounds: The number of complete rounds.
    """
    patience, compared = config.evaluation.patience, rounds - compares_aggregated(config.method)
    return patience is not None and best is not None and compared - best.since >= patience


def bring_back(base: Base, side: ClientSide, kept: State) -> Callable[[], PreTrainedModel]:
    """Restore a client's best model.

    Args:
        base: The client's base.
        side: The client's method object, which is restored to its state in the round of the best
            model, but without moments. It is not changed if the best model is the untrained base.
        kept: The client's kept state, called `kept-NAME` in a checkpoint.

    Returns:
        A function that returns the best model, with its adapter attached to the base.
    """
    if SIDE not in kept.parts:
        return partial(bare, base)
    side.restore(kept.parts[SIDE])
    return side.model

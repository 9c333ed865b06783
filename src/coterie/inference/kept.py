"""The best model of a client, chosen by the score on the client's own validation text.

The choice is made by the client, under every engine, and is not sent to the server. A checkpoint
has, beside the state of each client, the file `kept-NAME` with the round of the best model so far,
its score and the state to restore. The file contains no such state if the best model is the
untrained base.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.evaluation.evaluate import evaluate
from coterie.federation.participants import Participant
from coterie.messages import State
from coterie.methods.contract import ClientSide, Method
from coterie.methods.pretrained import bare
from coterie.training.spec import DPOSpec

SIDE = "side"
"""The name of the client side's state within the state in `kept-NAME`."""


@dataclass(frozen=True)
class Best:
    """The best model of a client so far, with its scores on validation text."""

    round: int
    """The number of rounds that were complete when the client had this model.

    0 for the untrained base.
    """
    loss: float
    """The loss in nats per token of the validation samples, or of their answers if they have any.

    For pairs of answers, the loss that training minimises, such as DPO's.
    """
    accuracy: float | None
    """The share of questions with choices answered correctly, or of pairs ranked correctly.

    None without choices and pairs.
    """
    since: int
    """The number of rounds that were complete when this model became the best.

    Equal to `round`, except for the untrained base: the rounds before the client's first.
    """

    def order(self) -> tuple[float, float]:
        """Return a key by which the best model is sorted first.

        Returns:
            The negated accuracy (0 without one), then the loss.
        """
        return -(self.accuracy or 0.0), self.loss


class Keeper:
    """A comparison of the models that a client has after each round, and of the untrained base.

    Args:
        config: The run.
        base: The client's base.
        participant: The client's data, of which the validation text is used.
        side: The client's side of the method.
    """

    def __init__(
        self, config: RunConfig, base: Base, participant: Participant, side: ClientSide
    ) -> None:
        self.base, self.side, self.batch = base, side, config.evaluation.batch
        validation, limit = participant.data.validation, config.evaluation.validation_samples
        self.window = config.data.window
        self.samples = validation.few(limit, self.window, base.context_token)
        dpo = config.training.dpo or DPOSpec()
        self.is_reference = config.data.declared.referenced and dpo.reference == "base"
        """Whether the untrained base is the reference model of DPO."""
        self.best: Best | None = None
        """The best model so far; None before the client's first round."""
        self.unsaved: State | None = None
        """The state for `kept-NAME` if it has changed since the last checkpoint, else None."""

    def begin(self, rounds: int) -> None:
        """Keep the untrained base if no model is kept yet.

        Args:
            rounds: The number of complete rounds.
        """
        if self.best is None:
            if self.is_reference:  # all margins are exactly 0; computed ones have rounding errors
                self._keep(Best(0, math.log(2), 0.5, rounds))
            else:
                self._keep(self._scored(bare(self.base), 0, rounds))

    def compare(self, rounds: int) -> Best:
        """Score the side's current model, and keep the model if it is the best so far.

        Args:
            rounds: The number of complete rounds.

        Returns:
            The scores of the current model.
        """
        assert self.best is not None, "begin() comes first"
        current = self._scored(self.side.model(), rounds, rounds)
        if current.order() < self.best.order():
            self._keep(current, {SIDE: self.side.state()})
        return current

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
            kept: The state in `kept-NAME`; None before the client's first round.
        """
        self.best, self.unsaved = best_of(kept), None


def best_of(kept: State | None) -> Best | None:
    """Return the scores and the round of a client's best model.

    Args:
        kept: The state in `kept-NAME`; None before the client's first round.

    Returns:
        The best model; None before the client's first round.
    """
    return None if kept is None else Best(**kept.values)


def compares_aggregated(method: Method) -> bool:
    """Return whether models are compared after a download rather than after local training.

    Args:
        method: The run's method.
    """
    return method.reports == "aggregated" and bool(method.schema().down)


def stops(config: RunConfig, best: Best | None, rounds: int) -> bool:
    """Return whether a client stops after a round.

    A client stops if its model has not improved in the last `evaluation.patience` rounds. The last
    complete round does not count if models are compared after its download, which comes later.

    Args:
        config: The run.
        best: The client's best model so far; None before the client's first round.
        rounds: The number of complete rounds.
    """
    patience, compared = config.evaluation.patience, rounds - compares_aggregated(config.method)
    return patience is not None and best is not None and compared - best.since >= patience


def bring_back(base: Base, side: ClientSide, kept: State) -> Callable[[], PreTrainedModel]:
    """Restore a client's side to its best model.

    Args:
        base: The client's base.
        side: The client's side, which is changed.
        kept: The state in `kept-NAME`.

    Returns:
        A function that attaches the adapter, if there is one, and returns the model.
    """
    if SIDE not in kept.parts:
        return partial(bare, base)
    side.restore(kept.parts[SIDE])
    return side.model

"""The best model that a client has had, by the client's own validation text.

The client finds it where its text is, whatever engine runs it, and tells nobody. A checkpoint has,
beside each client's state, the file `kept-NAME`: which round's model is the best so far, what it
scored, and the state to go back to. A client whose best model is the base as it came has no such
state.
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
"""The part of a kept state that is the client's own."""


@dataclass(frozen=True)
class Best:
    """Which of a client's models is the best so far."""

    round: int
    """Rounds that were complete when the client had it; 0: the base as it came."""
    loss: float
    """Nats per token of the validation samples (of their answers, where there are any); where
    answers are compared, the loss that is learnt, such as DPO's."""
    accuracy: float | None
    """With instructions: the share of those with choices that it answers; None where there are
    none. Where answers are compared: the share of pairs that it ranks rightly."""
    since: int
    """Rounds that were complete when it became the best: `round`, but of the base as it came those
    before the client's first."""

    def order(self) -> tuple[float, float]:
        """What the best comes first by: the highest accuracy, where there is one; then the loss."""
        return -(self.accuracy or 0.0), self.loss


class Keeper:
    """Compares the models that a client has after each round, and the base as it came."""

    def __init__(
        self, config: RunConfig, base: Base, participant: Participant, side: ClientSide
    ) -> None:
        self.base, self.side, self.at_once = base, side, config.evaluation.batch
        validation, most = participant.data.validation, config.evaluation.validation_samples
        self.window = config.data.window
        self.samples = validation.few(most, self.window, base.context_token)
        dpo = config.training.dpo or DPOSpec()
        self.is_reference = config.data.declared.referenced and dpo.reference == "base"
        """Whether the base as it came is what pairs' rewards are measured from."""
        self.best: Best | None = None
        """None before the client's first round."""
        self.found: State | None = None
        """The best model's state, until it is in a checkpoint."""

    def begin(self, rounds: int) -> None:
        """Keep the base as it came, unless a model is kept; after so many rounds without this
        client."""
        if self.best is None:
            if self.is_reference:  # all margins are 0, whatever they are rounded to
                self._keep(Best(0, math.log(2), 0.5, rounds))
            else:
                self._keep(self._scored(bare(self.base), 0, rounds))

    def compare(self, rounds: int) -> Best:
        """Keep the side's model after so many rounds if it is better than all before it; what it
        scores."""
        assert self.best is not None, "begin() comes first"
        found = self._scored(self.side.model(), rounds, rounds)
        if found.order() < self.best.order():
            self._keep(found, {SIDE: self.side.state()})
        return found

    def _keep(self, best: Best, parts: dict[str, State] | None = None) -> None:
        self.best, self.found = best, State(values=asdict(best), parts=parts or {})

    def _scored(self, model: PreTrainedModel, round: int, since: int) -> Best:
        score = evaluate(self.base, model, self.samples, self.window, self.at_once)
        loss = score.loss if score.learnt is None else score.learnt
        accuracy = score.figures.get("reward_accuracy", score.figures.get("accuracy"))
        if not math.isfinite(loss):  # worse than any other
            loss, accuracy = sys.float_info.max, None if accuracy is None else -1.0
        return Best(round, loss, accuracy, since)

    def restore(self, kept: State | None) -> None:
        """Go on from a checkpoint's kept state; None: from the start."""
        self.best, self.found = best_of(kept), None


def best_of(kept: State | None) -> Best | None:
    """What a checkpoint's kept state tells of the best model; None before the client's first
    round."""
    return None if kept is None else Best(**kept.values)


def compares_aggregated(method: Method) -> bool:
    """Whether models are compared after a download rather than after local training."""
    return method.reports == "aggregated" and bool(method.schema().down)


def stops(config: RunConfig, best: Best | None, rounds: int) -> bool:
    """Whether a client takes no part in rounds after so many: it has gained nothing for long.

    What it has of the last of them is not compared yet where that needs the next download.
    """
    patience, compared = config.evaluation.patience, rounds - compares_aggregated(config.method)
    return patience is not None and best is not None and compared - best.since >= patience


def bring_back(base: Base, side: ClientSide, kept: State) -> Callable[[], PreTrainedModel]:
    """Take the side back to a kept state; what gives its model, as often as it is asked for."""
    if SIDE not in kept.parts:
        return partial(bare, base)
    side.restore(kept.parts[SIDE])
    return side.model

"""Ditto (arXiv 2012.04221): a personal adapter that stays near the averaged adapter.

In each round, a client trains a copy of the averaged adapter w, which is sent and averaged as in
FedAvg, and its personal adapter v, which never leaves the client. The loss of v has the additional
term `lambda / 2 ||v - w||^2` (algorithm 1), where w is the averaged adapter that the client has
received in this round.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from coterie.adapters import Trainable
from coterie.messages import State
from coterie.methods.adapter import AdapterClient, M
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ClientContext
from coterie.methods.tensors import copied, copy, squared_distance
from coterie.training.local import LocalTraining
from coterie.training.schedule import Penalty
from coterie.turn import Turn


class Ditto(FedIT):
    """Ditto: personal LoRA pairs that stay near the averaged LoRA pairs.

    Clients train the personal pairs for as many steps as the averaged pairs, so a round takes about
    twice as long as in FedAvg.
    """

    name: ClassVar[str] = "ditto"
    paper: ClassVar[str] = "arXiv 2012.04221"
    summary: ClassVar[str] = "LoRA pairs averaged; personal pairs stay near the average"
    reports: ClassVar[Literal["trained", "aggregated"]] = "trained"

    proximity: float = Field(default=1.0, ge=0)
    """weight of the term that keeps the personal pairs near the averaged pairs (lambda)"""

    def client(self, context: ClientContext) -> "DittoClient":
        return DittoClient(self, context)


class PersonalClient(AdapterClient[M]):
    """A client with a personal and an averaged adapter; its model uses the personal adapter.

    The personal adapter is trained from the exchange `first` on.
    """

    def __init__(
        self,
        method: M,
        context: ClientContext,
        personal: Trainable,
        penalty: Penalty | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(method, context)
        self.personal = personal
        [level] = method.levels(self)
        level = replace(
            level, name="personal", penalty=penalty, active=lambda number: number >= first
        )
        self.personal_training = LocalTraining(context, personal, [level])

    def model(self) -> PreTrainedModel:
        return self.personal.attach(self.context.base.model)

    def state(self) -> State:
        state = super().state()
        personal = State({"adapter": copied(self.personal.tensors())})
        parts = {"personal": personal, "personal-training": self.personal_training.state()}
        return replace(state, parts={**state.parts, **parts})

    def restore(self, state: State) -> None:
        super().restore(state)
        copy(state.parts["personal"]["adapter"], self.personal.tensors())
        self.personal_training.restore(state.parts["personal-training"])


class DittoClient(PersonalClient[Ditto]):
    """A client that keeps its personal adapter near the averaged adapter."""

    def __init__(self, method: Ditto, context: ClientContext) -> None:
        personal = method.adapter(context.base.model, context.seed, context.name)
        super().__init__(method, context, personal, penalty=self._distance)

    def train(self, turn: Turn) -> None:
        self.received = copied(self.shared)
        self.training.run(turn.exchange)
        self.personal_training.run(turn.exchange)

    def _distance(self) -> Tensor:
        device, personal = self.context.base.device, self.personal.tensors()
        return self.method.proximity / 2 * squared_distance(personal, self.received, device)

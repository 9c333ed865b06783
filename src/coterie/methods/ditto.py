"""Ditto (arXiv 2012.04221): a personal adapter that stays near the averaged adapter.

In each round, a client trains a copy of the averaged adapter w, which is sent and averaged as in
FedAvg, and its personal adapter v, which never leaves the client. The objective of v is the
client's loss f plus `lambda / 2 ||v - w||^2`, where w is the averaged adapter that the client has
received in this round. In algorithm 1, v takes steps of gradient descent with learning rate eta:

    v <- v - eta (grad f(v) + lambda (v - w)).

Here, the run's optimiser takes a step on the gradient of f, and then

    v <- v - eta lambda (v - w),

where v is the value after the step. With gradient descent, the two differ by terms of order eta^2.
Other optimisers, such as AdamW, would change the size of lambda (v - w) if it were part of the
gradient.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from transformers import PreTrainedModel

from coterie.adapters import Trainable
from coterie.messages import State
from coterie.methods.adapter import AdapterClient, M
from coterie.methods.averaging import FedIT
from coterie.methods.contract import ClientContext
from coterie.methods.tensors import copied, copy
from coterie.training.local import LocalTraining
from coterie.training.schedule import Pull
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
    """strength of the pull of the personal pairs towards the averaged pairs (lambda)"""

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
        pull: Pull | None = None,
        first: int = 0,
    ) -> None:
        super().__init__(method, context)
        self.personal = personal
        [level] = method.levels(self)
        level = replace(level, name="personal", pull=pull, active=lambda number: number >= first)
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
        super().__init__(method, context, personal, lambda: (method.proximity, self.received))

    def train(self, turn: Turn) -> None:
        self.received = copied(self.shared)
        self.training.run(turn.exchange)
        self.personal_training.run(turn.exchange)

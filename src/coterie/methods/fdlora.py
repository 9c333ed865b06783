"""FDLoRA (arXiv 2406.07925): a shared and a private adapter, fused with two weights per client.

Before the first round, every client trains alone; the mean of the resulting adapters initialises
the shared adapter. In the inner loop of a round, each client then trains the shared adapter
locally. In the outer step, the server applies SGD with Nesterov momentum to the shared adapter,
with `shared - mean(uploads)` as the gradient. A client's model is the weighted sum of both
adapters. A gradient-free search on held-out training samples (the fusion set) chooses the weights
w1 and w2:

    A = w1 A_shared + w2 A_private,    B = w1 B_shared + w2 B_private
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from transformers import PreTrainedModel

from coterie.bases.precision import autocast
from coterie.bases.sites import QUERY_VALUE
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.messages import Message, State, Tensors
from coterie.messages.names import FUSION
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, Shared
from coterie.methods.contract import ClientContext, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, refuse_unused
from coterie.methods.tensors import copied, copy
from coterie.seeding import generator
from coterie.training.apart import set_apart
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate
from coterie.turn import Turn

FUSION_BATCHES = 5
"""The number of batches of the fusion set on which a search scores a candidate (w1, w2)."""
FUSION_BUDGET = 5
"""The number of candidates (w1, w2) that a search scores."""
LARGEST_WEIGHT = 1.5
"""The largest absolute value of w1 and of w2."""
L1_PENALTY = 0.05
"""The factor of mean(|w1|, |w2|) in the cost of a candidate (w1, w2), in nats."""


class FDLora(AdapterMethod):
    """FDLoRA: a client's model uses the weighted sum of a shared and a private adapter."""

    name: ClassVar[str] = "fdlora"
    paper: ClassVar[str] = "arXiv 2406.07925"
    summary: ClassVar[str] = "shared LoRA averaged, then fused with a private LoRA"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: Lora = Lora(scale="rank")
    local_steps: int | None = Field(default=None, ge=1)
    """steps of training alone before the first round; null: training.steps"""
    private: Literal["snapshot", "trained"] = "snapshot"
    """private adapter; snapshot: copy of the locally trained shared adapter, taken in the first
    round and then every sync_every rounds, as in the released code; trained: trained separately in
    every round, as in the paper"""
    sync_every: int = Field(default=5, ge=1)
    """rounds between snapshots"""
    outer_learning_rate: float = Field(default=1.0, gt=0)
    """learning rate of the server's SGD"""
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov momentum of the server's SGD"""
    fusion_share: float = Field(default=0.05, gt=0, lt=1)
    """fraction of the training samples held out for the search of the adapters' weights"""

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.private == "trained":
            refuse_unused(self, "private: trained", "sync_every")
        return self

    def exchanges(self, rounds: int) -> int:
        return rounds + 1  # clients train alone in exchange 0

    def levels(self, client: AdapterClient) -> list[Level]:
        rate = learning_rate(client.context.training, self.exchanges(client.context.rounds))
        return [replace(level, learning_rate=rate) for level in super().levels(client)]

    def check(self, run: RunFacts) -> None:
        super().check(run)
        if run.server_optimiser:
            raise CoterieError(
                f"The method {self.name!r} has a server optimiser of its own (outer_learning_rate, "
                "outer_momentum); remove aggregation.optimiser."
            )

    def client(self, context: ClientContext) -> "FDLoraClient":
        return FDLoraClient(self, context)

    def server(self, context: ServerContext) -> "FDLoraServer":
        return FDLoraServer(self, context)


class FDLoraClient(AdapterClient[FDLora]):
    """A client with a shared adapter, a private adapter, and their weighted sum as its model."""

    def __init__(self, method: FDLora, context: ClientContext) -> None:
        context, self.samples = set_apart(context, "fusion set", method.fusion_share)
        super().__init__(method, context)
        self.private, self.fused = (
            method.adapter(context.base.model, context.seed, context.name) for _ in range(2)
        )
        self.private_training = self._private_training(context, "private")
        self.began = False
        """Whether the client has trained the private adapter alone (done in its first exchange)."""
        self.weights = [1.0, 0.0]
        """The weight w1 of the shared adapter and the weight w2 of the private adapter."""

    def receive(self, download: Message) -> None:
        _nevergrad()  # fail before training if the package is missing
        super().receive(download)
        if download.exchange == self.method.exchanges(self.context.rounds):
            self._fuse(download.exchange)

    def train(self, turn: Turn) -> None:
        # In exchange 0, every client trains alone; exchange 1 is the paper's round 0. A client that
        # joins later trains alone in its first exchange.
        if not self.began:
            self._train_alone()
        if turn.exchange == 0:
            copy(self.private.tensors(), self.adapter.tensors())
        else:
            self.training.run(turn.exchange)
            self._update_private(turn.exchange)
        self._fuse(turn.exchange)

    def model(self) -> PreTrainedModel:
        shared, private = self.adapter.tensors(), self.private.tensors()
        w1, w2 = self.weights
        copy(
            {n: w1 * p.detach() + w2 * private[n] for n, p in shared.items()},
            self.fused.tensors(),
        )
        return self.fused.attach(self.context.base.model)

    def state(self) -> State:
        state = super().state()
        private = State({"adapter": copied(self.private.tensors())})
        parts = {"private": private, "private-training": self.private_training.state()}
        values = {"fusion": list(self.weights), "began": self.began}
        return replace(state, values=values, parts={**state.parts, **parts})

    def restore(self, state: State) -> None:
        super().restore(state)
        copy(state.parts["private"]["adapter"], self.private.tensors())
        self.private_training.restore(state.parts["private-training"])
        self.weights, self.began = list(state.values["fusion"]), state.values["began"]

    def _private_training(self, context: ClientContext, name: str) -> LocalTraining:
        """Create an object that trains the private adapter.

        Args:
            context: The data and the training settings.
            name: A name on which the seed of the training batches depends.
        """
        levels = [replace(level, name=name) for level in self.method.levels(self)]
        return LocalTraining(context, self.private, levels)

    def _train_alone(self) -> None:
        """Train the private adapter alone, from initial values that are equal on all clients."""
        training = self.context.training
        steps = self.method.local_steps or training.steps
        training = training.model_copy(update={"steps": steps})
        self._private_training(replace(self.context, training=training), "alone").run(0)
        self.began = True

    def _update_private(self, exchange: int) -> None:
        """Update the private adapter after the local steps of an exchange on the shared adapter.

        As the setting `private` specifies, the private adapter is either trained in every round, or
        replaced by a copy of the shared adapter every `sync_every` rounds.
        """
        if self.method.private == "trained":
            self.private_training.run(exchange)
        elif (exchange - 1) % self.method.sync_every == 0:
            copy(self.adapter.tensors(), self.private.tensors())

    @torch.no_grad()
    def _fuse(self, round: int) -> None:
        """Choose the weights of the shared adapter (w1) and of the private adapter (w2).

        The weights minimise `loss + 0.05 mean(|w1|, |w2|)` on the fusion set, which consists of the
        training samples that are held out for this purpose. A gradient-free search finds the
        weights.
        """
        context, samples = self.context, self.samples
        chance = generator(context.seed, "fusion", context.name, round)
        batch = context.training.batch
        rows = torch.randint(len(samples.ids), (FUSION_BATCHES * batch,), generator=chance)
        batches = list(samples.only(rows).to(context.base.device).split(batch))

        def cost(weights: Any) -> float:
            self.weights = [float(weight) for weight in weights]
            model = self.model()
            with autocast(context.base.precision, context.base.device.type):
                loss = fmean(part.loss(model)[0].item() for part in batches)
            return loss + L1_PENALTY * fmean(map(abs, self.weights))

        ng = _nevergrad()
        with _numpy_seeded(int(torch.randint(2**31, (), generator=chance))):
            space = ng.p.Array(init=[0.0, 0.0], lower=-LARGEST_WEIGHT, upper=LARGEST_WEIGHT)
            best = ng.optimizers.NGOpt(space, budget=FUSION_BUDGET).minimize(cost)
        self.weights = [float(weight) for weight in best.value]
        context.log(FUSION, self.weights)


@dataclass(frozen=True, eq=False)
class WithMomentum(Shared):
    """The shared adapter, and the server's momentum buffer."""

    momentum: Tensors = field(default_factory=dict)


class FDLoraServer(AdapterServer[FDLora, WithMomentum]):
    """A server that averages in exchange 0 and then takes a Nesterov SGD step per exchange.

    Let `mean` be the mean of the uploads. In exchange 0, `mean` becomes the shared adapter. With
    `delta = shared - mean`, the learning rate lr, the momentum coefficient mu and the momentum
    buffer m, the step is `m <- mu m + delta`, `shared <- shared - lr (delta + mu m)`.
    """

    def initial(self) -> WithMomentum:
        return WithMomentum(self.start)

    def aggregate(self, value: WithMomentum, exchange: Exchange) -> WithMomentum:
        lr, mu = self.method.outer_learning_rate, self.method.outer_momentum
        if exchange.turn.exchange == 0:
            return super().aggregate(value, exchange)
        shared, momentum = dict(value.adapter), dict(value.momentum)
        for name, tensor in exchange.mean("adapter").items():
            delta = shared[name] - tensor
            m = momentum[name] = mu * momentum[name] + delta if name in momentum else delta
            shared[name] = shared[name] - lr * (delta + mu * m)
        return replace(value, adapter=shared, momentum=momentum)


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator inside a `with` block, and restore its state afterwards.

    nevergrad seeds the generators of its parameters from NumPy's global generator, and some of
    nevergrad's optimisers draw numbers from the global generator directly.
    """
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # SciPy warns about nevergrad's options
            yield
    finally:
        np.random.set_state(state)


def _nevergrad() -> Any:
    try:
        import nevergrad
    except ImportError:
        raise CoterieError(
            "The method 'fdlora' uses nevergrad to choose the fusion weights; install nevergrad "
            "with pip install 'coterie[fdlora]'."
        ) from None
    return nevergrad

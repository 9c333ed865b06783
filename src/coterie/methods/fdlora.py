"""FDLoRA (arXiv 2406.07925): a shared LoRA and a private one, fused by two weights per client.

Before the first round every client trains alone; the mean of these adapters is the first shared
one. From then on a round is an inner loop, a client's AdamW steps on the shared adapter, and an
outer step of the server, SGD with Nesterov momentum on `shared - mean(uploads)`. For its own model
a client adds both adapters, weighted by what a gradient-free search finds on samples that are set
apart from training:

    A = w1 A_shared + w2 A_private,    B = w1 B_shared + w2 B_private
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from transformers import PreTrainedModel

from coterie.bases.precision import autocast
from coterie.bases.sites import QUERY_VALUE
from coterie.errors import CoterieError
from coterie.messages import Message, State
from coterie.messages.names import FUSION
from coterie.methods.adapter import AdapterClient, AdapterMethod, AdapterServer, copied, copy
from coterie.methods.contract import ClientContext, Holders, RunFacts, ServerContext
from coterie.methods.settings import Attention, Lora, refuse_unused
from coterie.seeding import generator
from coterie.training.apart import set_apart
from coterie.training.local import LocalTraining
from coterie.training.schedule import Level, learning_rate

BATCHES = 5
"""Of the fusion set, to score weights on."""
SEARCHES = 5
"""Weights that are tried."""
LARGEST = 1.5
"""Of a weight, either sign."""
SPARSITY = 0.05
"""What the mean size of the weights costs, in nats."""


class FDLora(AdapterMethod):
    """A shared adapter, a private one, and their weighted sum."""

    name: ClassVar[str] = "fdlora"
    paper: ClassVar[str] = "arXiv 2406.07925"
    summary: ClassVar[str] = "shared LoRA averaged, then fused with a private LoRA"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: Lora = Lora(scale="rank")
    local_steps: int | None = Field(default=None, ge=1)
    """steps of a client's first stage; null: training.steps"""
    private: Literal["snapshot", "trained"] = "snapshot"
    """private adapter: snapshot of the locally trained shared adapter in the first round and then
    every sync_every rounds, as released; or trained separately in every round, as in the paper"""
    sync_every: int = Field(default=5, ge=1)
    """rounds between snapshots"""
    outer_learning_rate: float = Field(default=1.0, gt=0)
    """learning rate of the server's SGD"""
    outer_momentum: float = Field(default=0.5, ge=0, lt=1)
    """Nesterov's"""
    fusion_share: float = Field(default=0.05, gt=0, lt=1)
    """fraction of the training samples to set apart for the search of both adapters' weights"""

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.private == "trained":
            refuse_unused(self, "private: trained", "sync_every")
        return self

    def exchanges(self, rounds: int) -> int:
        """One more than rounds: clients train alone before the first."""
        return rounds + 1

    def levels(self, client: AdapterClient) -> list[Level]:
        """As always; the learning rate's schedule has one round more."""
        rate = learning_rate(client.context.training, self.exchanges(client.context.rounds))
        return [replace(level, learning_rate=rate) for level in super().levels(client)]

    def check(self, run: RunFacts) -> None:
        """The server has no second optimiser."""
        super().check(run)
        if run.server_optimiser:
            raise CoterieError(
                f"The method {self.name!r} has a server optimiser of its own (outer_learning_rate, "
                "outer_momentum); remove aggregation.optimiser."
            )

    def client(self, context: ClientContext) -> "FDLoraClient":
        """Two adapters."""
        return FDLoraClient(self, context)

    def server(self, context: ServerContext) -> "FDLoraServer":
        """The outer steps."""
        return FDLoraServer(self, context)


class FDLoraClient(AdapterClient[FDLora]):
    """Trains the shared adapter, keeps a private one, and is scored with their sum."""

    def __init__(self, method: FDLora, context: ClientContext) -> None:
        context, self.samples = set_apart(context, "fusion set", method.fusion_share)
        super().__init__(method, context)
        self.private, self.fused = (
            method.adapter(context.base.model, context.seed, context.name) for _ in range(2)
        )
        self.private_training = self._training_alone(context, "private")
        self.began = False
        """Whether the private adapter has been trained alone, whatever the round it was in."""
        self.weights = [1.0, 0.0]
        """Of the shared and of the private adapter."""

    def receive(self, download: Message) -> None:
        """Replace the shared adapter by the server's; after the last round, weigh both anew."""
        _nevergrad()  # before work is done in vain
        super().receive(download)
        if download.round == self.method.exchanges(self.context.rounds):
            self._fuse(download.round)

    def train(self, exchange: int) -> None:
        """The first stage alone, where it is not done; then the shared adapter's local steps.

        The first stage is exchange 0, and round 0 of the paper exchange 1.
        """
        if not self.began:
            self._begin()
        if exchange == 0:
            copy(self.private.tensors(), self.adapter.tensors())
        else:
            self.training.round(exchange)
            self._keep(exchange)
        self._fuse(exchange)

    def model(self) -> PreTrainedModel:
        """The base with the weighted sum of both adapters attached."""
        shared, private = self.adapter.tensors(), self.private.tensors()
        w1, w2 = self.weights
        copy(
            {n: w1 * p.detach() + w2 * private[n] for n, p in shared.items()},
            self.fused.tensors(),
        )
        return self.fused.attach(self.context.base.model)

    def state(self) -> State:
        """The private adapter, its moments and the weights too."""
        state = super().state()
        private = State({"adapter": copied(self.private.tensors())})
        parts = {"private": private, "private-training": self.private_training.state()}
        values = {"fusion": list(self.weights), "began": self.began}
        return replace(state, values=values, parts={**state.parts, **parts})

    def restore(self, state: State) -> None:
        """Take all of it back."""
        super().restore(state)
        copy(state.parts["private"]["adapter"], self.private.tensors())
        self.private_training.restore(state.parts["private-training"])
        self.weights, self.began = list(state.values["fusion"]), state.values["began"]

    def _training_alone(self, context: ClientContext, name: str) -> LocalTraining:
        """The private adapter's training, on batches of its own."""
        levels = [replace(level, name=name) for level in self.method.levels(self)]
        return LocalTraining(context, self.private, levels)

    def _begin(self) -> None:
        """Train the private adapter alone, from the shared first values: a round 0 by itself."""
        training = self.context.training
        steps = self.method.local_steps or training.steps
        training = training.model_copy(update={"steps": steps})
        self._training_alone(replace(self.context, training=training), "alone").round(0)
        self.began = True

    def _keep(self, round: int) -> None:
        """Bring the private adapter up to date after a round's local steps."""
        if self.method.private == "trained":
            self.private_training.round(round)
        elif (round - 1) % self.method.sync_every == 0:
            copy(self.adapter.tensors(), self.private.tensors())

    @torch.no_grad()
    def _fuse(self, round: int) -> None:
        """Search weights that minimise `loss + 0.05 mean(|w1|, |w2|)` on the fusion set."""
        context, samples = self.context, self.samples
        chance = generator(context.seed, "fusion", context.name, round)
        batch = context.training.batch
        drawn = torch.randint(len(samples.ids), (BATCHES * batch,), generator=chance)
        batches = list(samples.only(drawn).to(context.base.device).split(batch))

        def cost(weights: Any) -> float:
            self.weights = [float(weight) for weight in weights]
            model = self.model()
            with autocast(context.base.precision, context.base.device.type):
                loss = fmean(part.loss(model)[0].item() for part in batches)
            return loss + SPARSITY * fmean(map(abs, self.weights))

        ng = _nevergrad()
        with _numpy_seeded(int(torch.randint(2**31, (), generator=chance))):
            space = ng.p.Array(init=[0.0, 0.0], lower=-LARGEST, upper=LARGEST)
            found = ng.optimizers.NGOpt(space, budget=SEARCHES).minimize(cost)
        self.weights = [float(weight) for weight in found.value]
        context.log(FUSION, self.weights)


class FDLoraServer(AdapterServer[FDLora]):
    """The mean after round 0; then one step of SGD with Nesterov momentum for every round."""

    def __init__(self, method: FDLora, context: ServerContext) -> None:
        super().__init__(method, context)
        self.kept["momentum"] = {}

    def end_round(self, mean: Message, held: Holders) -> None:
        """Take the outer step: with delta = shared - mean, m <- mu m + delta and
        shared <- shared - lr (delta + mu m)."""
        lr, mu = self.method.outer_learning_rate, self.method.outer_momentum
        if self.exchange == 0:
            super().end_round(mean, held)
            return
        momentum = self.kept["momentum"]
        for name, tensor in mean["adapter"].items():
            delta = self.shared[name] - tensor
            m = momentum[name] = mu * momentum[name] + delta if name in momentum else delta
            self.shared[name] = self.shared[name] - lr * (delta + mu * m)
        self.exchange += 1


@contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """NumPy's own generator, from a seed inside and untouched after.

    nevergrad seeds its parameters' generator from it, and some of its searches draw from it.
    """
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a search's own settings are odd to SciPy
            yield
    finally:
        np.random.set_state(before)


def _nevergrad() -> Any:
    try:
        import nevergrad
    except ImportError:
        raise CoterieError(
            "The method 'fdlora' searches its fusion weights with nevergrad; install it with "
            "pip install 'coterie[fdlora]'."
        ) from None
    return nevergrad

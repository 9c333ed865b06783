"""The baselines: local fine-tuning, federated averaging and its variants.

Local and FedAvg train two sets of LoRA pairs on every MLP and average the outputs of the two sets.
The two methods therefore have as many trained parameters as a mixture of two experts (CoMiGS, arXiv
2409.13931, section 4.1).
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from coterie.adapters import Layout
from coterie.adapters.full import FullAdapter
from coterie.bases.sites import QUERY_VALUE
from coterie.methods.adapter import AdapterClient, AdapterMethod
from coterie.methods.contract import ClientId
from coterie.methods.exact import SETTING
from coterie.methods.registry import fine_tuned
from coterie.methods.settings import Attention, Lora, OwnSets, SharedSets
from coterie.training.schedule import Level


class Local(AdapterMethod):
    """Local fine-tuning: every client trains alone."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "each client trains alone; nothing is sent"
    shared_roles: ClassVar[tuple[str, ...]] = ()

    mlp: OwnSets | None = OwnSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()


class LocalFull(AdapterMethod):
    """Full local fine-tuning: every client trains all weights of the base on its own."""

    name: ClassVar[str] = "local-full"
    summary: ClassVar[str] = (
        "each client trains all weights of the base on its own; nothing is sent"
    )
    shared_roles: ClassVar[tuple[str, ...]] = ()

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> FullAdapter:
        return FullAdapter(base)


class FedAvg(AdapterMethod):
    """Federated averaging of all trained parameters; each client's result is the averaged model."""

    name: ClassVar[str] = "fedavg"
    paper: ClassVar[str] = "arXiv 1602.05629"
    summary: ClassVar[str] = "all trained parameters averaged; one model for all"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    mlp: SharedSets | None = SharedSets()
    attention: Attention | None = Attention()
    lora: Lora = Lora()
    exact: bool = SETTING


class FedProx(FedAvg):
    """Federated averaging with a proximal term that keeps clients close to the server's model.

    In the paper, the loss of a client has the term mu / 2 ||w - w_t||^2, where w are the trained
    parameters, and w_t are their values at the start of the round. Here, after each step of the
    optimiser with learning rate eta, w <- w - eta mu (w - w_t), where w is the value after the
    step. With gradient descent, the two differ by terms of order eta^2.
    """

    name: ClassVar[str] = "fedprox"
    paper: ClassVar[str] = "arXiv 1812.06127"
    summary: ClassVar[str] = (
        "like fedavg; a proximal term keeps clients close to the averaged parameters"
    )

    mu: float = Field(default=0.01, ge=0)
    """strength of the proximal term"""

    def levels(self, client: AdapterClient) -> list[Level]:
        [level] = super().levels(client)
        return [replace(level, pull=lambda: (self.mu, client.training.start))]


class FFALora(AdapterMethod):
    """Federated averaging of B alone. A is frozen at initial values that are equal on all clients.

    All clients have the same A, so mean(B) A is exactly the mean of the clients' products B A.
    """

    name: ClassVar[str] = "ffa-lora"
    paper: ClassVar[str] = "arXiv 2403.12313"
    summary: ClassVar[str] = "B of each LoRA pair averaged; A frozen and the same for all clients"
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"

    mlp: SharedSets | None = SharedSets(sets=1, rank=16)
    attention: Attention | None = Attention()
    lora: Lora = Lora()

    def layout(self, client: ClientId) -> Layout:
        return replace(super().layout(client), freeze_A=True)


class FedIT(AdapterMethod):
    """Federated averaging of one LoRA pair on each query and value projection."""

    name: ClassVar[str] = "fedit"
    paper: ClassVar[str] = "arXiv 2305.05644"
    summary: ClassVar[str] = (
        "LoRA pairs on all query and value projections are averaged; one model for all"
    )
    reports: ClassVar[Literal["trained", "aggregated"]] = "aggregated"
    shared_roles: ClassVar[tuple[str, ...]] = ("dense",)

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: Lora = Lora(scale="rank")


PRESETS = fine_tuned("fedavg") | fine_tuned("fedit")

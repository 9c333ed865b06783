"""Federated BitFit (arXiv 2106.10199; FedPEFT, arXiv 2210.01708): only biases are trained."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from coterie import Role
from coterie.adapters import Parameter, Trainable
from coterie.adapters.parameter import initialise, trained_beside
from coterie.bases.sites import Linear, StandIn, attention_linears, sizes, working_dtype
from coterie.methods.adapter import AdapterMethod


class BiasRole(Role):
    name = "bias"
    summary = "biases that are added to the linear layers of attention"


class Biased(StandIn):
    def __init__(self, base: Linear) -> None:
        super().__init__(base)
        _, width = sizes(base)
        self.bias = nn.Parameter(torch.zeros(width, **trained_beside(base.weight)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(working_dtype(x))
        return self.base(x) + self.bias.to(x.dtype)


class Biases(AdapterMethod):
    """The biases are averaged over clients."""

    name: ClassVar[str] = "fed-bias"
    paper: ClassVar[str] = "arXiv 2210.01708"
    summary: ClassVar[str] = "biases of attention's linear layers are averaged"
    shared_roles: ClassVar[tuple[str, ...]] = ("bias",)

    def adapter(self, base: nn.Module, seed: int, client: str) -> Trainable:
        layers = {path: Biased(linear) for path, linear in attention_linears(base).items()}
        parameters = [
            Parameter(f"bias/{path}", "bias", layer.bias, "zero", path)
            for path, layer in layers.items()
        ]
        initialise(parameters, seed, client, self.shared)
        return Trainable(parameters, layers)

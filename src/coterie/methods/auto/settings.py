"""The settings of Auto: adapters, trials, and how often parameters are averaged."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from coterie.adapters import Parameter
from coterie.methods.adapter import AdapterMethod
from coterie.methods.settings import Attention, Generalists, PhasedRouter


class AutoSettings(AdapterMethod):
    """Settings of Auto, and the parameters that uploads, downloads and trials contain."""

    shared_roles: ClassVar[tuple[str, ...]] = ("dense", "generalist", "router")

    mlp: Generalists = Generalists()
    router: PhasedRouter = PhasedRouter()
    samples: int = Field(default=32, ge=2)
    """number of validation samples on which a client judges other clients"""
    set_aside: float = Field(default=0.5, ge=0, lt=1)
    """fraction of the validation samples reserved for judging; routers are trained on the rest (0:
    both use all samples)"""
    trials: Literal["parameters", "gradients"] = "parameters"
    """what trials exchange; parameters: clients receive one another's attention pairs, and compute
    their weights; gradients: clients send gradients of their validation samples, and the server
    computes the weights"""
    trust: float = Field(default=100.0, ge=0)
    """step size of the change of weights, per nat (eta)"""
    peers: int = Field(default=16, ge=1)
    """maximum number of other clients in a trial; of more clients, half are those with the largest
    weights (at first, with the most similar changes), and the others rotate"""
    every: int = Field(default=2, ge=1)
    """how often experts other than the first are averaged: every this many rounds"""

    def sends(self, parameter: Parameter, exchange: int) -> bool:
        return self.shared(parameter) and (
            parameter.role == "dense" or not parameter.expert or (exchange + 1) % self.every == 0
        )

    def downloaded(self, parameters: Mapping[str, Parameter], complete: bool) -> set[str]:
        """Return the names of a download's tensors: all, or those averaged in every exchange."""
        exchange = self.every - 1 if complete else 0
        return {name for name, p in parameters.items() if self.sends(p, exchange)}

    def judges(self, parameter: Parameter) -> bool:
        """Return whether trials compare a parameter: of attention or, without it, of expert 0."""
        attention = self.part("attention", Attention)
        return parameter.expert == 0 if attention is None else parameter.role == "dense"

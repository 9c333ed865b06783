"""Trained parameters describe themselves, so that nobody matches their names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.adapters.layout import Role
from coterie.bases.sites import place_of
from coterie.seeding import generator


@dataclass(frozen=True)
class Parameter:
    """A trained tensor, described by the module that owns it."""

    name: str
    """Its name in messages and states, unlike any other parameter's of the same adapter."""
    role: Role
    tensor: nn.Parameter
    start: Literal["kaiming", "zero", "normal"]
    """How its values begin; see `initialise`."""
    path: str = ""
    """Of the base's module that it stands on; empty for what stands on none, as a prompt."""
    factor: Literal["A", "B"] | None = None
    """Which factor of a low-rank product B A it is, if it is one."""
    expert: int | None = None
    """The number of its expert: among those of its role, or of all domain experts."""

    @property
    def layer(self) -> int | None:
        """The number of the base's layer that it stands in, from 0."""
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.path)
        return None if number is None else int(number[1])

    @cached_property
    def place(self) -> str:
        """What it stands on, whatever the base calls it: `mlp.up`, `attention.q`."""
        return place_of(self.path)


Selects = Callable[[Parameter], bool]
"""Selects parameters by their description."""


def of_roles(*roles: Role) -> Selects:
    """Return a predicate that selects the parameters of these roles."""
    return lambda parameter: parameter.role in roles


def trained(parameter: Parameter) -> bool:
    """Return whether training may change a parameter: all but frozen ones."""
    return parameter.role != "frozen"


def trained_beside(weight: Tensor) -> dict[str, Any]:
    """The device and dtype of what is trained beside a weight: float64 if that is; where the weight
    is not (on the meta device), the CPU."""
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return {"device": "cpu" if weight.is_meta else weight.device, "dtype": dtype}


def initialise(parameters: Iterable[Parameter], seed: int, client: str, common: Selects) -> None:
    """Draw the first values: A Kaiming uniform (a = sqrt 5), B zero, routers normal (0.02).

    Each tensor has a generator of its own, so neither the order nor the other tensors matter.
    Parameters that are `common` or frozen start equal for all clients. The others differ by the
    client's name.
    """
    for parameter in parameters:
        alike = parameter.role == "frozen" or common(parameter)
        purpose = ("init", parameter.name) if alike else ("init", parameter.name, client)
        chance = generator(seed, *purpose)
        value = torch.zeros(parameter.tensor.shape)
        if parameter.start == "kaiming":
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=chance)
        elif parameter.start == "normal":
            nn.init.normal_(value, std=0.02, generator=chance)
        parameter.tensor.data.copy_(value)


def by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Parameters by name, sorted."""
    return {p.name: p for p in sorted(parameters, key=lambda p: p.name)}


def pairs_of(parameters: Mapping[str, Parameter]) -> list[tuple[Parameter, Parameter]]:
    """The A and the B of every low-rank pair among some parameters, sorted by the name of A."""
    As = {_pair(p): p for _, p in sorted(parameters.items()) if p.factor == "A"}
    Bs = {_pair(p): p for p in parameters.values() if p.factor == "B"}
    return [(A, Bs[pair]) for pair, A in As.items() if pair in Bs]


def _pair(parameter: Parameter) -> tuple[Role, int | None, str]:
    return parameter.role, parameter.expert, parameter.path

"""Descriptions of an adapter's parameters, so that no code has to parse the parameters' names."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from coterie.adapters.roles import ROLES, Role
from coterie.bases.sites import place_of
from coterie.seeding import generator


@dataclass(frozen=True)
class Parameter:
    """A tensor of an adapter, and a description of the tensor."""

    name: str
    """Name in messages and states, unique within an adapter."""
    role: str
    """Name of the parameter's role; see `coterie.adapters.roles`."""
    tensor: nn.Parameter
    start: Literal["kaiming", "zero", "normal"]
    """Distribution of the initial values; see `initialise`."""
    path: str = ""
    """Path of the adapted module in the base; empty if no module is adapted (soft prompts)."""
    factor: Literal["A", "B"] | None = None
    """Whether the tensor is the factor A or B of a low-rank product B A; None if it is neither."""
    expert: int | None = None
    """Index of the expert to which the tensor belongs; None if it belongs to no expert. Domain
    experts are numbered across the whole run, and other experts are numbered within their role. The
    first expert always has the index 0."""

    def __post_init__(self) -> None:
        """Raise CoterieError if there is no role with the given name."""
        ROLES.check(self.role)

    @property
    def kind(self) -> type[Role]:
        """The class of the parameter's role."""
        return ROLES.get(self.role)

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer that contains the adapted module; the first layer has index 0.

        The index is None if the module is outside the decoder layers.
        """
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self.path)
        return None if number is None else int(number[1])

    @cached_property
    def place(self) -> str:
        """The adapted module's architecture-independent name, such as `mlp.up`; see `place_of`."""
        return place_of(self.path)


Selects = Callable[[Parameter], bool]
"""A predicate that returns True for the parameters to select."""


def of_roles(*roles: str) -> Selects:
    """Return a predicate that selects the parameters with one of the given roles.

    Args:
        roles: Names of roles.

    Returns:
        The predicate.

    Raises:
        CoterieError: There is no role with one of the names.
    """
    for role in roles:
        ROLES.check(role)
    return lambda parameter: parameter.role in roles


def trained(parameter: Parameter) -> bool:
    """Return whether training can change a parameter; see `Role.trained`."""
    return parameter.kind.trained


def trained_beside(weight: Tensor) -> dict[str, Any]:
    """Return the device and dtype of parameters that adapt a weight.

    The dtype is float32, or float64 if the weight's dtype is float64. The device is the device of
    the weight, or the CPU if the weight is on the meta device.
    """
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return {"device": "cpu" if weight.is_meta else weight.device, "dtype": dtype}


def initialise(parameters: Iterable[Parameter], seed: int, client: str, common: Selects) -> None:
    """Set the initial values of parameters in place.

    The attribute `start` of a parameter specifies the distribution of its initial values.

    `kaiming` stands for the Kaiming uniform distribution (a = sqrt 5), and `normal` for the normal
    distribution with mean 0 and standard deviation 0.02.

    Each tensor has its own generator, so initial values do not depend on other tensors.

    Args:
        parameters: Parameters, modified in place.
        seed: The run's seed.
        client: The client's name.
        common: A predicate that selects the parameters whose initial values are equal on all
            clients. The initial values of parameters that training cannot change are always equal
            on all clients. The initial values of all other parameters depend on the client's name.
    """
    for parameter in parameters:
        is_common = not trained(parameter) or common(parameter)
        purpose = ("init", parameter.name) if is_common else ("init", parameter.name, client)
        chance = generator(seed, *purpose)
        value = torch.zeros(parameter.tensor.shape)
        if parameter.start == "kaiming":
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=chance)
        elif parameter.start == "normal":
            nn.init.normal_(value, std=0.02, generator=chance)
        parameter.tensor.data.copy_(value)


def by_name(parameters: Iterable[Parameter]) -> dict[str, Parameter]:
    """Return a mapping from the names of parameters to the parameters, sorted by name."""
    return {p.name: p for p in sorted(parameters, key=lambda p: p.name)}


def pairs_of(parameters: Mapping[str, Parameter]) -> list[tuple[Parameter, Parameter]]:
    """Return the factors (A, B) of every low-rank pair, sorted by the name of A."""
    As = {_pair(p): p for _, p in sorted(parameters.items()) if p.factor == "A"}
    Bs = {_pair(p): p for p in parameters.values() if p.factor == "B"}
    return [(A, Bs[pair]) for pair, A in As.items() if pair in Bs]


def _pair(parameter: Parameter) -> tuple[str, int | None, str]:
    return parameter.role, parameter.expert, parameter.path

"""Roles of parameters, and the registry of roles."""

from collections.abc import Mapping
from typing import Any, ClassVar

from coterie.registry import Registry


class Role:
    """The role of parameters in a method.

    Methods select parameters to train, send or average by the names of the parameters' roles. The
    class variables of a role tell tables, checks and estimates what they must know of these
    parameters. A plugin whose method has parameters of a new role defines a subclass, for example::

        class Gate(Role):
            name = "gate"
            summary = "a factor for each adapted layer"
    """

    name: ClassVar[str]
    """The role's name, as in `Parameter.role` and in the tables of `coterie audit`."""
    summary: ClassVar[str]
    """The description of shared parameters of this role in a method's schema."""
    trained: ClassVar[bool] = True
    """Whether training can change the parameters.

    Parameters that training cannot change have equal initial values on all clients.
    """
    pairs: ClassVar[tuple[str, str]] = ("LoRA", "on")
    """The kind of low-rank pairs of this role (`LoRA` or `experts`), and their position relative to
    the adapted block (`on` or `inside`), in the coverage that `coterie base` shows."""
    numbered: ClassVar[bool] = True
    """Whether an expert's number denotes the same expert on every layer."""
    replaces_weights: ClassVar[bool] = False
    """Whether the parameters are differences from the base's weights (full fine-tuning)."""
    extends_input: ClassVar[bool] = False
    """Whether the parameters are additional inputs of the base. The memory of a training step is
    not estimated then."""


OWN: Mapping[str, Mapping[str, Any]] = {
    "dense": {"summary": "LoRA pairs on single linear layers, usually in the attention blocks"},
    "generalist": {
        "summary": "LoRA pairs of the generalists, usually on the MLPs",
        "pairs": ("experts", "inside"),
    },
    "specialist": {
        "summary": "LoRA pairs of the specialists, usually on the MLPs",
        "pairs": ("experts", "inside"),
    },
    "router": {"summary": "parameters of the routers"},
    "frozen": {"summary": "parameters that keep their initial values", "trained": False},
    "shared": {
        "summary": "LoRA pairs of the expert that all clients hold (FedAMoLE)",
        "pairs": ("experts", "on"),
    },
    "domain": {
        "summary": "LoRA pairs of the domain experts, which choose their clients (FedAMoLE)",
        "pairs": ("experts", "on"),
        "numbered": False,
    },
    "projection": {"summary": "parameters of the routers of domain experts (FedAMoLE)"},
    "prompt": {"summary": "soft prompt, or the encoder that computes it", "extends_input": True},
    "weight": {"summary": "differences from the base's weights", "replaces_weights": True},
}
"""The class variables of each built-in role, by the role's name."""
_CLASSES = {name: type(name, (Role,), {"name": name, **changes}) for name, changes in OWN.items()}

ROLES: Registry[type[Role]] = Registry(
    noun="role",
    builtin={name: lambda kind=kind: kind for name, kind in _CLASSES.items()},
    group="coterie.roles",
    base="coterie.adapters.roles:Role",
    requires={"summary": ": a description of the parameters in one line"},
)

"""Names and tensors of FedAMoLE's experts, as both sides and their messages know them."""

from torch import Tensor

from coterie.adapters import AmoleAdapter

Held = dict[str, list[int]]
"""By the path of an adapted layer, the domain experts that a client holds there, ascending."""


def values_of(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """What travels of an adapter, by name: views of its parameters, not copies."""
    return {name: p.tensor.detach() for name, p in adapter.parameters().items()}


def expert_name(path: str, number: int) -> str:
    """The name of a domain expert's mean embedding."""
    return f"{path}.{number}"

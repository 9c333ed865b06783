"""Names and tensors of FedAMoLE's experts in messages, which both sides use."""

from torch import Tensor

from coterie.adapters import AmoleAdapter

Held = dict[str, list[int]]
"""The ascending numbers of a client's domain experts, by the path of the adapted layer."""


def values_of(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """Return the tensors of an adapter's parameters by name, as detached views."""
    return {name: p.tensor.detach() for name, p in adapter.parameters().items()}


def expert_name(path: str, number: int) -> str:
    """Return the name of a domain expert's mean embedding in messages."""
    return f"{path}.{number}"

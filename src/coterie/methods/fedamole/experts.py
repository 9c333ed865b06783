"""Names and tensors of FedAMoLE's experts in messages, used by clients and the server."""

from torch import Tensor

from coterie.adapters import AmoleAdapter

Held = dict[str, list[int]]
"""For the path of each adapted layer, the ascending numbers of a client's domain experts."""


def values_of(adapter: AmoleAdapter) -> dict[str, Tensor]:
    """Return detached views of an adapter's parameters, under the parameters' names."""
    return {name: p.tensor.detach() for name, p in adapter.parameters().items()}


def expert_name(path: str, number: int) -> str:
    """Return the name that the mean embedding of a domain expert has in messages."""
    return f"{path}.{number}"

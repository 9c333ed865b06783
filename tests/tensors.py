"""Values, means and comparisons of tensors by name."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def fill(tensors: Tensors, std: float, seed: int) -> None:
    """Draw normally distributed values for tensors."""
    chance = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.data.normal_(std=std, generator=chance)


def equal(values: Tensors, other: Tensors) -> bool:
    """Return whether tensors with the same names are bit-identical."""
    assert values.keys() == other.keys() != set()
    return all(torch.equal(values[name].cpu(), other[name].cpu()) for name in values)


def close_to(values: Tensors, other: Tensors, atol: float = 1e-6) -> bool:
    """Return whether tensors with the same names are equal up to rounding."""
    assert values.keys() == other.keys() != set()
    return all(torch.allclose(values[n].double(), other[n].double(), atol=atol) for n in values)


def mean_of(tensors: Iterable[Tensors], weights: Iterable[float] = ()) -> dict[str, Tensor]:
    """Return `sum_k w_k x_k / sum_k w_k` of each tensor over those who hold it, in float64."""
    held = list(tensors)
    pairs = list(zip(held, list(weights) or [1.0] * len(held), strict=True))
    means = {}
    for name in {name for each in held for name in each}:
        terms = [(each[name].double(), weight) for each, weight in pairs if name in each]
        total = sum(weight for _, weight in terms)
        means[name] = torch.stack([weight / total * tensor for tensor, weight in terms]).sum(0)
    return means

"""Functions on named tensors, which both sides of methods use."""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy values into the tensors of `target` in place, from the tensors of the same names."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros with the same shapes, dtypes and devices as the tensors, by name."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies of tensors, by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

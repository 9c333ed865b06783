"""Functions on mappings from names to tensors, used by both client and server code."""

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy tensors of `source` in place into the tensors of `target` with the same names."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map each tensor's name to zeros with the tensor's shape, dtype and device."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return detached copies of tensors, under the same names."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Map the name of each tensor to the tensor's shape."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

"""Functions on mappings from names to tensors, used by both client and server code."""

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.messages.host import on_host
from coterie.messages.names import ROUTING
from coterie.training.context import ClientContext


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


def closest(tensors: Mapping[str, Tensor], *starts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the start with the smallest distance from `tensors`, or the first of equal starts.

    Tensors that a start does not have with the same name and shape are ignored.
    """

    def distance(start: Mapping[str, Tensor]) -> float:
        shared = ((t, start[n]) for n, t in tensors.items() if n in start)
        pairs = ((t, s) for t, s in shared if t.shape == s.shape)
        return sum(float((t.double() - s.detach().double()).square().sum()) for t, s in pairs)

    return min(starts, key=distance)


def log_routing(context: ClientContext, routing: Mapping[str, Tensor]) -> None:
    """Log the mean routing weights of each layer in the last batch."""
    for layer, weights in on_host(routing).items():
        context.log(f"{ROUTING}{layer}", weights.tolist())


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Map the name of each tensor to the tensor's shape."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

"""The mean of what clients upload, each name over the clients that hold it."""

from collections.abc import Mapping

import torch
from torch import Tensor


class RunningMean:
    """Mean of tensors, one upload at a time: memory does not grow with the number of clients.

    Federated averaging (McMahan et al., arXiv 1602.05629); weights are equal unless given.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Count one client's tensors in; a name must have the same shape in all of them."""
        for name, tensor in tensors.items():
            if name in self._sums:
                self._sums[name].add_(tensor, alpha=weight)
            else:
                self._sums[name] = tensor.to(torch.float64, copy=True).mul_(weight)
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def result(self) -> dict[str, Tensor]:
        """The means in float32, by name; empty if nothing was added."""
        return {
            name: (total / self._weights[name]).to(torch.float32)
            for name, total in self._sums.items()
        }

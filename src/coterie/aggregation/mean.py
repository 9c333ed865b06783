"""The mean of what clients upload, each name over the clients that hold it."""

from collections.abc import Mapping

import torch
from torch import Tensor


class RunningMean:
    """Uniform mean, one upload at a time: memory does not grow with the number of clients.

    Federated averaging with equal weights (McMahan et al., arXiv 1602.05629).
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Count one client's tensors in; a name must have the same shape in all of them."""
        for name, tensor in tensors.items():
            if name in self._sums:
                self._sums[name] += tensor
            else:
                self._sums[name] = tensor.to(torch.float64, copy=True)
            self._counts[name] = self._counts.get(name, 0) + 1

    def result(self) -> dict[str, Tensor]:
        """The means in float32, by name; empty if nothing was added."""
        return {
            name: (total / self._counts[name]).to(torch.float32)
            for name, total in self._sums.items()
        }

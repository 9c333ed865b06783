"""The coordinate-wise median (Yin et al., arXiv 1803.01498, definition 1) in place of the mean.

Up to half of the clients can send anything, and every number of the result still lies between
numbers that other clients sent. Memory grows with the number of clients.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from coterie.transforms.contract import Contribution, Memory, Reduction


class Median(Reduction):
    name: ClassVar[str] = "my_median"
    summary: ClassVar[str] = "coordinate-wise median of uploads"
    least: ClassVar[int] = 3

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> dict[str, dict[str, Tensor]]:
        held: dict[str, dict[str, list[Tensor]]] = {}
        for contribution in contributions:
            for group, tensors in contribution.groups.items():
                for name, tensor in tensors.items():
                    held.setdefault(group, {}).setdefault(name, []).append(tensor.double())
        return {
            group: {n: torch.stack(each).quantile(0.5, dim=0).float() for n, each in names.items()}
            for group, names in held.items()
        }

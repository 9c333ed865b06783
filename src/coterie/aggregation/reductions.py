"""Reductions that a minority of wrong uploads moves little: median and trimmed mean.

Yin et al., arXiv 1803.01498, definitions 1 and 2, for each number over the clients that hold it.
Unlike the mean, they need all uploads in memory at once, and ignore weights.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.transform import Contribution, Memory, Reduction, TransformFacts
from coterie.errors import CoterieError
from coterie.messages import Groups


class Median(Reduction):
    """The coordinate-wise median; of an even number, the mean of the middle two."""

    name: ClassVar[str] = "median"
    summary: ClassVar[str] = "coordinate-wise median of uploads in place of their mean"
    least: ClassVar[int] = 3

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        """Return the median of each number."""
        return reduced(contributions, lambda uploads: uploads.quantile(0.5, dim=0))


class TrimmedMean(Reduction):
    """The mean of each number without its smallest and its largest values."""

    name: ClassVar[str] = "trimmed_mean"
    summary: ClassVar[str] = "mean of uploads without the extreme values of each number"
    least: ClassVar[int] = 3

    trim: float = Field(default=0.2, gt=0, lt=0.5)
    """share of values to drop at either end, at least one"""

    def check(self, run: TransformFacts) -> None:
        """Refuse a share that drops every value."""
        super().check(run)
        if 2 * self._dropped(len(run.clients)) >= len(run.clients):
            raise CoterieError(
                f"trimmed_mean with trim: {self.trim} drops the uploads of all "
                f"{len(run.clients)} clients; lower trim, or take more clients."
            )

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        """Return the trimmed mean of each number."""
        return reduced(contributions, self._trimmed)

    def _trimmed(self, uploads: Tensor) -> Tensor:
        """Return the mean over the first dimension, without the extremes where enough are left."""
        dropped = min(self._dropped(len(uploads)), (len(uploads) - 1) // 2)
        return uploads.sort(dim=0).values[dropped : len(uploads) - dropped].mean(dim=0)

    def _dropped(self, clients: int) -> int:
        return max(1, int(self.trim * clients))


def reduced(
    contributions: Iterable[Contribution], reduce: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return one tensor for each group and name, from a stack of those that clients hold.

    Args:
        contributions: the uploads.
        reduce: turns (clients, ...) in float64 into (...).
    """
    held: dict[str, dict[str, list[Tensor]]] = {}
    for contribution in contributions:
        for group, tensors in contribution.groups.items():
            for name, tensor in tensors.items():
                held.setdefault(group, {}).setdefault(name, []).append(tensor)
    return {
        group: {n: reduce(torch.stack(ts).double()).float() for n, ts in tensors.items()}
        for group, tensors in held.items()
    }

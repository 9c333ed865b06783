"""Reductions that are robust to a minority of wrong uploads: median and trimmed mean.

Yin et al. (arXiv 1803.01498, definitions 1 and 2) define both reductions. Each element is reduced
over the clients that uploaded the element. Unlike the mean, these reductions ignore weights and
need all uploads in memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.errors import CoterieError
from coterie.messages import Groups
from coterie.transforms.contract import Contribution, Memory, Reduction, TransformFacts


class Median(Reduction):
    """The coordinate-wise median: the middle value, or the mean of the two middle values."""

    name: ClassVar[str] = "median"
    summary: ClassVar[str] = "coordinate-wise median of uploads in place of their mean"
    least: ClassVar[int] = 3

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        return reduced(contributions, lambda uploads: uploads.quantile(0.5, dim=0))


class TrimmedMean(Reduction):
    """The coordinate-wise mean without the largest and the smallest values.

    The setting `trim` is the fraction of all values that is dropped at each end.
    """

    name: ClassVar[str] = "trimmed_mean"
    summary: ClassVar[str] = (
        "coordinate-wise mean of uploads, after each coordinate's largest and smallest values are "
        "dropped"
    )
    least: ClassVar[int] = 3

    trim: float = Field(default=0.2, gt=0, lt=0.5)
    """fraction of the values to drop at each end; the number of dropped values is rounded down, but
    is at least 1"""

    def check(self, run: TransformFacts) -> None:
        super().check(run)
        if 2 * self._dropped(len(run.clients)) >= len(run.clients):
            raise CoterieError(
                f"With trim = {self.trim}, the transform 'trimmed_mean' would drop the uploads of "
                f"all {len(run.clients)} clients; lower trim, or add clients."
            )

    def reduce(
        self, contributions: Iterable[Contribution], clients: Sequence[str], memory: Memory
    ) -> Groups:
        return reduced(contributions, self._trimmed)

    def _trimmed(self, uploads: Tensor) -> Tensor:
        # Only few clients may have uploaded a tensor, so at least one value must remain.
        dropped = min(self._dropped(len(uploads)), (len(uploads) - 1) // 2)
        return uploads.sort(dim=0).values[dropped : len(uploads) - dropped].mean(dim=0)

    def _dropped(self, clients: int) -> int:
        return max(1, int(self.trim * clients))


def reduced(
    contributions: Iterable[Contribution], reduce: Callable[[Tensor], Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Reduce each tensor over the clients that uploaded the tensor.

    Args:
        contributions: The uploads.
        reduce: A function that takes the clients' tensors, stacked into one float64 tensor
            (clients, ...), and returns the reduced tensor (...).

    Returns:
        The reduced float32 tensors, keyed by group and name.
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

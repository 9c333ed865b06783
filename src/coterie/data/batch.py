"""A batch of samples, padded at their ends where their lengths differ."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor


class Batch(NamedTuple):
    """What a loss is taken of; tokens 0 .. time-1 are read, 1 .. time predicted."""

    ids: Tensor
    """(batch, time + 1) int64"""
    counted: Tensor | None = None
    """Which of ids[:, 1:] the loss counts, (batch, time) bool; None: all."""
    real: Tensor | None = None
    """Which of ids[:, :-1] are no padding, (batch, time) bool; None: all."""

    @property
    def terms(self) -> int:
        """Of how many terms the loss is the mean: tokens."""
        return self.ids[:, 1:].numel() if self.counted is None else int(self.counted.sum())

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self._make(None if part is None else part.to(device) for part in self)

    def by_length(self) -> Self:
        """The same samples, the shortest first; as they are where nothing is padding."""
        return self if self.real is None else self.only(self.real.sum(1).argsort(stable=True))

    def alike(self, price: int) -> Iterator[tuple[Tensor, Self]]:
        """The same in pieces of similar lengths, each cut to its longest sample: the samples'
        numbers, and the piece.

        What all pieces read, padding included, and `price` tokens for each are least together. A
        batch without masks is one piece.
        """
        everything = torch.arange(len(self.ids), device=self.ids.device)
        if self.counted is None or self.real is None:
            yield everything, self
            return
        lengths, order = self.real.sum(1).sort(stable=True)
        longest = lengths.tolist()
        ends = _ends(longest, price)
        if len(ends) == 1:
            order = everything
        for start, end in zip([0, *ends], ends, strict=False):
            rows, time = order[start:end], longest[end - 1]
            counted, real = self.counted[rows, :time], self.real[rows, :time]
            yield rows, type(self)(self.ids[rows, : time + 1], counted, real)

    def only(self, rows: Tensor | slice) -> Self:
        """Some of the samples, by their numbers."""
        return self._make(None if part is None else part[rows] for part in self)

    def split(self, size: int) -> Iterator[Self]:
        """The same in batches of at most `size`."""
        for start in range(0, len(self.ids), size):
            yield self.only(slice(start, start + size))


def _ends(lengths: Sequence[int], price: int) -> list[int]:
    """Where each piece ends of samples of ascending lengths, so that all pieces cost least."""
    costs, starts = [0], [0]
    for end, length in enumerate(lengths, start=1):
        cost, start = min((costs[s] + (end - s) * length + price, s) for s in range(end))
        costs.append(cost)
        starts.append(start)
    ends = [len(lengths)]
    while starts[ends[0]]:
        ends.insert(0, starts[ends[0]])
    return ends

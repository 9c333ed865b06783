"""A batch of samples, padded at their ends where their lengths differ."""

from collections.abc import Iterator
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
    def tokens(self) -> int:
        """How many tokens the loss counts."""
        return self.ids[:, 1:].numel() if self.counted is None else int(self.counted.sum())

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        masks = (None if mask is None else mask.to(device) for mask in self[1:])
        return type(self)(self.ids.to(device), *masks)

    def only(self, rows: Tensor) -> Self:
        """Some of the samples, by their numbers."""
        masks = (None if mask is None else mask[rows] for mask in self[1:])
        return type(self)(self.ids[rows], *masks)

    def split(self, size: int) -> Iterator[Self]:
        """The same in batches of at most `size`."""
        for start in range(0, len(self.ids), size):
            rows = slice(start, start + size)
            masks = (None if mask is None else mask[rows] for mask in self[1:])
            yield type(self)(self.ids[rows], *masks)

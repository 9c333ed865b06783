"""The part of a split that is the same for all splits whose samples are whole items."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class ItemSplit:
    """A split whose training samples are its items, not windows of a stream."""

    items: tuple[Any, ...]
    """The items as text."""

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    @property
    def needs_reference(self) -> bool:
        """Whether the log-likelihoods of a reference model are still missing. By default, False."""
        return False

    def referenced(self, make: Callable[[Any], Any]) -> Self:
        """Return the split itself, because by default the loss uses no reference model.

        If the loss of a subclass uses a reference model, the subclass returns a copy of the split
        with the reference model's log-likelihoods.

        Args:
            make: A function that computes the reference model's log-likelihoods of a split.
        """
        return self

    def samples(self, window: int, step: int) -> Self:
        """Return the split itself, because batches consist of whole items, not of windows."""
        return self

    def without(self, taken: Tensor, window: int) -> Self:
        """Return all items in order, except those with the indices `taken`."""
        left = torch.ones(len(self), dtype=torch.bool)
        left[taken] = False
        return self.only(left.nonzero().flatten().tolist())

    def few(self, most: int, window: int, context: int) -> Self:
        """Return at most `most` items, evenly spaced."""
        return self.only(even(len(self), most).tolist())

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the texts in which duplicates are searched for; the argument is not used."""
        return self.items

    def only(self, chosen: Sequence[int]) -> Self:
        """Return the items with the indices `chosen`, in that order."""
        raise NotImplementedError


def even(count: int, most: int) -> Tensor:
    """Return at most `most` of the indices 0 .. count-1, evenly spaced."""
    size = min(count, most)
    return torch.arange(size) * count // size

"""Which tokens of a batch are padding: it takes no part in routing figures or embeddings.

Samples of different lengths are padded at their ends, where causal attention never looks at it, so
only what is summed over all tokens must leave it out. The models pass no mask down to their linear
layers; it is set around a forward pass instead.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_real: ContextVar[Tensor | None] = ContextVar("real", default=None)
_goes_on: ContextVar[bool] = ContextVar("goes_on", default=False)
_repeats: ContextVar[bool] = ContextVar("repeats", default=False)


@contextmanager
def real_tokens(mask: Tensor | None, goes_on: bool = False) -> Iterator[None]:
    """Forward passes inside read these tokens: (batch, time) bool, False where it is padding.

    One that goes on is a further piece of the batch that the pass before it read: figures over
    tokens are over all of its pieces.
    """
    before = _real.set(mask), _goes_on.set(goes_on)
    try:
        yield
    finally:
        _real.reset(before[0])
        _goes_on.reset(before[1])


def keeping_nothing() -> AbstractContextManager[None]:
    """Forward passes inside read what one here and now would read, and modules keep nothing of
    them: they have kept it."""
    mask = _real.get()

    @contextmanager
    def again() -> Iterator[None]:
        before = _repeats.set(True)
        try:
            with real_tokens(mask):
                yield
        finally:
            _repeats.reset(before)

    return again()


def real_mask(device: torch.device) -> Tensor | None:
    """The mask of the forward pass under way, (batch, time), on a device; None where nothing is
    padding."""
    mask = _real.get()
    return None if mask is None else mask.to(device)


def only_real(rows: Tensor) -> Tensor:
    """Of (batch * time, ...) the rows that are no padding."""
    mask = real_mask(rows.device)
    return rows if mask is None else rows[mask.flatten()]


def kept(before: Tensor | None, now: Tensor) -> Tensor:
    """What a module keeps of a batch: rows of this piece, after those `before` if it goes on."""
    if before is None:
        return now
    if _repeats.get():
        return before
    return torch.cat([before, now]) if _goes_on.get() else now

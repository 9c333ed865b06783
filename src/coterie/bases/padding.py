"""Which tokens of a batch are padding: it takes no part in routing figures or embeddings.

Samples of different lengths are padded at their ends, where causal attention never looks at it, so
only what is summed over all tokens must leave it out. The models pass no mask down to their linear
layers; it is set around a forward pass instead.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor


class _Pass(NamedTuple):
    """What a forward pass reads: the mask, and whether it goes on or repeats what was read."""

    mask: Tensor | None = None
    goes_on: bool = False
    repeats: bool = False


NO_PADDING = _Pass()
_now: ContextVar[_Pass] = ContextVar("now", default=NO_PADDING)


@contextmanager
def _reading(what: _Pass) -> Iterator[None]:
    before = _now.set(what)
    try:
        yield
    finally:
        _now.reset(before)


def real_tokens(mask: Tensor | None, goes_on: bool = False) -> AbstractContextManager[None]:
    """Forward passes inside read these tokens: (batch, time) bool, False where it is padding.

    One that goes on is a further piece of the batch that the pass before it read: figures over
    tokens are over all of its pieces.
    """
    return _reading(_now.get()._replace(mask=mask, goes_on=goes_on))


def keeping_nothing() -> AbstractContextManager[None]:
    """Forward passes inside read what one here and now would read, and modules keep nothing of
    them: they have kept it."""
    return _reading(_now.get()._replace(goes_on=False, repeats=True))


def real_mask(device: torch.device) -> Tensor | None:
    """The mask of the forward pass under way, (batch, time), on a device; None where nothing is
    padding."""
    mask = _now.get().mask
    return None if mask is None else mask.to(device)


def only_real(rows: Tensor) -> Tensor:
    """Of (batch * time, ...) the rows that are no padding."""
    mask = real_mask(rows.device)
    return rows if mask is None else rows[mask.flatten()]


def kept(before: Tensor | None, now: Tensor) -> Tensor:
    """What a module keeps of a batch: rows of this piece, after those `before` if it goes on."""
    if before is None:
        return now
    if _now.get().repeats:
        return before
    return torch.cat([before, now]) if _now.get().goes_on else now

"""Which tokens of a batch are padding: it takes no part in routing figures or embeddings.

Samples of different lengths are padded at their ends, where causal attention never looks at it, so
only what is summed over all tokens must leave it out. The models pass no mask down to their linear
layers; it is set around a forward pass instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_real: ContextVar[Tensor | None] = ContextVar("real", default=None)


@contextmanager
def real_tokens(mask: Tensor | None) -> Iterator[None]:
    """Forward passes inside read these tokens: (batch, time) bool, False where it is padding."""
    before = _real.set(mask)
    try:
        yield
    finally:
        _real.reset(before)


def real_mask() -> Tensor | None:
    """The mask of the forward pass under way, (batch, time); None where nothing is padding."""
    return _real.get()


def only_real(rows: Tensor) -> Tensor:
    """Of (batch * time, ...) the rows that are no padding."""
    mask = _real.get()
    return rows if mask is None else rows[mask.flatten()]

"""Dropout in front of low-rank pairs: the A of every pair reads its own `dropout(x)` in training.

Masks are drawn from a generator that is set around a training's forward pass, as the models pass
nothing down to their linear layers. Where none is set (evaluation) nothing is dropped.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

_chance: ContextVar[torch.Generator | None] = ContextVar("chance", default=None)


@contextmanager
def drawing_masks(chance: torch.Generator) -> Iterator[None]:
    """Forward passes inside draw masks from this generator, which is on the base's device."""
    before = _chance.set(chance)
    try:
        yield
    finally:
        _chance.reset(before)


def repeating_masks() -> AbstractContextManager[None]:
    """Forward passes inside draw the masks that one here and now would draw."""
    now = _chance.get()
    return nullcontext() if now is None else drawing_masks(now.clone_state())


def drops(rate: float) -> bool:
    """Whether this rate of dropout acts now."""
    return rate > 0 and _chance.get() is not None


def mask_like(x: Tensor, rate: float) -> Tensor:
    """A mask of x's shape and dtype: 0 with the probability `rate`, else 1 / (1 - rate)."""
    chance = _chance.get()
    assert chance is not None, "nothing drops out"
    kept = torch.empty_like(x, device=chance.device).bernoulli_(1 - rate, generator=chance)
    return kept.div_(1 - rate).to(x.device)


def dropout(x: Tensor, rate: float) -> Tensor:
    """x times a mask of its own, where dropout acts; else x."""
    return x * mask_like(x, rate) if drops(rate) else x

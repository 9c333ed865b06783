"""Dropout on the inputs of low-rank pairs: in training, every A has its own mask.

Models pass no random generator to their linear layers. In training, the generator is therefore set
in a context around each forward pass. In evaluation, no generator is set, so there is no dropout.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor

from coterie.scoped import scoped

_chance: ContextVar[torch.Generator | None] = ContextVar("chance", default=None)


def drawing_masks(chance: torch.Generator) -> AbstractContextManager[None]:
    """Enable dropout for all forward passes inside the `with` block.

    Args:
        chance: Random generator that draws the masks.
    """
    return scoped(_chance, chance)


def repeating_masks() -> AbstractContextManager[None]:
    """Return a context in which to repeat a forward pass with the same dropout masks.

    Call this function immediately before the first pass, but enter the returned context only for
    the second pass. The call copies the random generator that `drawing_masks` set. By drawing masks
    from the copy, the second pass repeats the masks of the first pass and does not advance the
    original generator.
    """
    now = _chance.get()
    return nullcontext() if now is None else drawing_masks(now.clone_state())


def drops(rate: float) -> bool:
    """Return whether dropout is active.

    Dropout is active if the rate is positive and the call is inside a `drawing_masks` block.
    """
    return rate > 0 and _chance.get() is not None


def mask_like(x: Tensor, rate: float) -> Tensor:
    """Draw a mask that has the shape and dtype of x.

    Each element is 0 with probability `rate`, and 1 / (1 - rate) otherwise.
    """
    chance = _chance.get()
    assert chance is not None, "dropout is not active"
    kept = torch.empty_like(x, device=chance.device).bernoulli_(1 - rate, generator=chance)
    return kept.div_(1 - rate).to(x.device)


def dropout(x: Tensor, rate: float) -> Tensor:
    """Multiply x by a newly drawn mask if dropout is active; otherwise return x unchanged."""
    return x * mask_like(x, rate) if drops(rate) else x

"""Forward passes of training, with dropout: that of LoRA pairs, and the base's own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coterie.adapters.dropout import drawing_masks
from coterie.bases.dropout import base_dropout
from coterie.chance import generator
from coterie.training.context import ClientContext

Purpose = tuple[str | int, ...]
"""What tells a forward pass from all others of its client."""


@contextmanager
def with_dropout(context: ClientContext, *purpose: str | int) -> Iterator[None]:
    """Forward passes inside drop out by the chance of this purpose of this client."""
    base = context.base
    seed = generator(context.seed, "dropout", context.name, *purpose).initial_seed()
    masks = torch.Generator(base.device).manual_seed(seed)
    with drawing_masks(masks), base_dropout(base.model, context.training.base_dropout, seed):
        yield

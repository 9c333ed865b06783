"""Forward passes of training, with the dropout of adapter and base, and with checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from coterie.adapters.dropout import drawing_masks
from coterie.bases.dropout import base_dropout
from coterie.seeding import generator
from coterie.training.checkpointing import checkpointing
from coterie.training.context import ClientContext

Purpose = tuple[str | int, ...]
"""A key for the dropout masks of a forward pass, unique among the client's forward passes."""


@contextmanager
def training_pass(context: ClientContext, *purpose: str | int) -> Iterator[None]:
    """Enable dropout for forward passes in the block, and checkpointing if the run uses it.

    Args:
        context: The client's context.
        purpose: The `Purpose` from which, with the seed and the client, the masks are drawn.
    """
    base, training = context.base, context.training
    seed = generator(context.seed, "dropout", context.name, *purpose).initial_seed()
    masks = torch.Generator(base.device).manual_seed(seed)
    rate = training.base_dropout
    saving = checkpointing(base.model, rate) if training.checkpointing else nullcontext()
    with drawing_masks(masks), base_dropout(base.model, rate, seed), saving:
        yield

"""Forward passes of training: with dropout, of LoRA pairs and the base's own, and checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from coterie.adapters.dropout import drawing_masks
from coterie.bases.dropout import base_dropout
from coterie.seeding import generator
from coterie.training.checkpointing import checkpointing
from coterie.training.context import ClientContext

Purpose = tuple[str | int, ...]
"""What tells a forward pass from all others of its client."""


@contextmanager
def training_pass(context: ClientContext, *purpose: str | int) -> Iterator[None]:
    """Forward passes inside drop out by the chance of this purpose of this client, and keep few
    activations if training is to checkpoint them."""
    base, training = context.base, context.training
    seed = generator(context.seed, "dropout", context.name, *purpose).initial_seed()
    masks = torch.Generator(base.device).manual_seed(seed)
    rate = training.base_dropout
    few = checkpointing(base.model, rate) if training.checkpointing else nullcontext()
    with drawing_masks(masks), base_dropout(base.model, rate, seed), few:
        yield

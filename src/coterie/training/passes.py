"""Forward passes of training, with dropout, and with settings of memory and time."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from coterie.adapters.dropout import drawing_masks
from coterie.adapters.fused import storing_activations
from coterie.bases.dropout import base_dropout
from coterie.seeding import generator
from coterie.training.checkpointing import checkpointing
from coterie.training.context import ClientContext

Purpose = tuple[str | int, ...]
"""Words and numbers that identify one forward pass of a client, to seed its dropout masks."""


@contextmanager
def training_pass(context: ClientContext, *purpose: str | int) -> Iterator[None]:
    """Enable dropout inside the `with` block.

    Gradient checkpointing and the storage of experts' activations are enabled if the run uses them.

    Args:
        context: The client's context.
        purpose: The `Purpose` of the forward pass. The dropout masks depend on the purpose, the
            run's seed and the client's name.
    """
    base, training = context.base, context.training
    seed = generator(context.seed, "dropout", context.name, *purpose).initial_seed()
    masks = torch.Generator(base.device).manual_seed(seed)
    rate = training.base_dropout
    saving = checkpointing(base.model, rate) if training.checkpointing else nullcontext()
    storing = storing_activations(training.store_activations)
    with drawing_masks(masks), base_dropout(base.model, rate, seed), saving, storing:
        yield

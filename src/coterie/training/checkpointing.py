"""Gradient checkpointing: the backward pass recomputes the activations inside each layer.

Only the inputs of the base's layers stay in memory. The checkpointing of Transformers works in
training mode only (a frozen base is in evaluation mode), and does not restore the context managers
around a forward pass. This module therefore wraps the layers that Transformers marks as
checkpointable. A layer is recomputed with the same dropout masks, padding and mode; attributes that
modules set in the forward pass keep their values.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from coterie.adapters.dropout import repeating_masks
from coterie.bases.dropout import dropping_out
from coterie.bases.padding import repeating_batch
from coterie.errors import CoterieError


@contextmanager
def checkpointing(model: PreTrainedModel, base_dropout: float) -> Iterator[None]:
    """Enable gradient checkpointing for the forward passes in the body of the `with` statement.

    The backward passes can run after the end of the `with` statement.

    Args:
        model: The base.
        base_dropout: The rate of the base's own dropout; 0 if it is off.

    Raises:
        CoterieError: The architecture has no layers that support checkpointing.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    nested = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    layers = [layer for layer in layers if layer not in nested]
    if not layers:
        raise CoterieError(
            f"{type(model).__name__} does not support gradient checkpointing; remove "
            "training.checkpointing."
        )
    originals = [layer.__dict__.get("forward") for layer in layers]  # set by accelerate
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward, model, base_dropout)
    try:
        yield
    finally:
        for layer, forward in zip(layers, originals, strict=True):
            del layer.forward  # uncovers the method of the class
            if forward is not None:
                layer.forward = forward


def _checkpointed(
    forward: Callable[..., Any], model: nn.Module, base_dropout: float, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward pass of a layer without storing activations, and return the output."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    recomputing = _entered(repeating_masks(), repeating_batch(), dropping_out(model, base_dropout))
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), recomputing),
        preserve_rng_state=base_dropout > 0,  # the base's dropout draws from torch's generators
        **kwargs,
    )


@contextmanager
def _entered(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Enter several context managers at the start of the backward pass.

    Some of the context managers apply only to the thread that enters them, and the backward pass
    can run in another thread than the forward pass.
    """
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield

"""Gradient checkpointing: of each of a base's layers only what enters it is kept for the backward
pass, which computes the rest again.

Transformers' own works in training mode alone, which a frozen base is not in, and knows nothing of
what is set around a forward pass; so the layers that it marks are wrapped here. A layer is computed
again with the same dropout masks, the same padding and in the same mode; modules keep what the
forward pass left in them.
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
    """Forward passes inside keep little, so that backward passes, inside or later, take longer.

    base_dropout: the rate of the base's own dropout, if it is on. Raises CoterieError if the
    architecture has no layers that can be computed again.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    within = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    layers = [layer for layer in layers if layer not in within]
    if not layers:
        raise CoterieError(
            f"{type(model).__name__} does not support gradient checkpointing; remove "
            "training.checkpointing."
        )
    before = [layer.__dict__.get("forward") for layer in layers]  # such as accelerate's
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward, model, base_dropout)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward  # the class's own stands behind it
            if forward is not None:
                layer.forward = forward


def _checkpointed(
    forward: Callable[..., Any], model: nn.Module, base_dropout: float, *args: Any, **named: Any
) -> Any:
    """What a layer's forward pass gives, without its activations."""
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    again = _again(repeating_masks(), repeating_batch(), dropping_out(model, base_dropout))
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), again),
        preserve_rng_state=base_dropout > 0,  # such dropout draws from torch's own generators
        **named,
    )


@contextmanager
def _again(*settings: AbstractContextManager[None]) -> Iterator[None]:
    """A backward pass may run in a thread of its own, long after all that was set now."""
    with ExitStack() as stack:
        for setting in settings:
            stack.enter_context(setting)
        yield

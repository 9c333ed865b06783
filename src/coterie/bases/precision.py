"""Number formats of training: float32, or bfloat16 products under autocast."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.bases.sites import Linear, walk

Precision = Literal["fp32", "bf16"]


def autocast(precision: Precision, device_type: str) -> torch.autocast:
    """The context in which a model of this precision runs forward."""
    return torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16")


SHORT_WINDOW = 256
"""Tokens up to which a CPU is faster with plain bf16 products than with fused attention, whose
backward pass is slow there (6 % of a GPT-2 step at 128); the scores of longer windows would take
too much memory."""


def prepare(base: PreTrainedModel, precision: Precision | None, window: int) -> None:
    """Freeze a base and make it fast for training in this precision on windows of this length."""
    base.requires_grad_(False).eval()
    if precision == "bf16":
        cast_frozen(base, torch.bfloat16)
        if base.device.type == "cpu" and window <= SHORT_WINDOW:
            base.set_attn_implementation("eager")


def cast_frozen(base: nn.Module, dtype: torch.dtype) -> None:
    """Freeze a base's linear layers and cast them once, for use under autocast to this dtype.

    Autocast would cast them again at each use, with the same result. Embeddings and norms keep
    their dtype, and with them the residual stream. An output head that is tied to the embedding
    keeps its weight too; the loss finds a cast copy of it through `frozen_weight`.
    """
    modules = [module for _, module in walk(base)]
    embeddings = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}
    for module in modules:
        if not isinstance(module, Linear):
            continue
        if id(module.weight) in embeddings:
            if module.weight.dtype != dtype:
                copy = module.weight.detach().to(dtype)
                module.register_buffer("cast_weight", copy, persistent=False)
            continue
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(False)
            if parameter.is_floating_point():  # and not quantised
                parameter.data = parameter.data.to(dtype)


def frozen_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """A linear layer's weight in a dtype, without a gradient; from its cast copy where there is one
    and nothing is added to the weight."""
    changed = parametrize.is_parametrized(linear)
    copy = None if changed else getattr(linear, "cast_weight", None)
    weight = copy if isinstance(copy, Tensor) and copy.dtype == dtype else linear.weight
    assert isinstance(weight, Tensor)
    return weight.detach().to(dtype)

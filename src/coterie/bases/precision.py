"""Precision of training: float32, or bfloat16 matrix products under autocast."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.bases.sites import Linear, walk

Precision = Literal["fp32", "bf16"]


def autocast(precision: Precision, device_type: str) -> torch.autocast:
    """Return the autocast context for forward passes. For fp32, the context is disabled."""
    return torch.autocast(device_type, torch.bfloat16, enabled=precision == "bf16")


SLOW_PRECISION = (
    "The run computes in bf16, in which this machine is far slower than in fp32; the server's "
    "operator can set training.precision to fp32."
)
"""The warning of a client whose machine is slow in the run's precision."""


def fast_precision(device_type: str) -> Precision:
    """Return bf16 if a type of device computes fast in it, and fp32 otherwise.

    On this machine's CPU, oneDNN must have kernels for bfloat16: it needs AVX-512, or an ARM
    processor with bfloat16. On other processors, matrix products in bf16 take about 40 times as
    long as in fp32. The answer is not measured, because it must be the same in all processes.

    Args:
        device_type: The type of the device, such as `cuda`. A GPU that this machine lacks is
            assumed to be fast.
    """
    if device_type == "cpu":
        has_kernels = torch.backends.mkldnn.is_available() and _onednn_supports_bf16()
        return "bf16" if has_kernels else "fp32"
    if device_type == "cuda" and torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16"


def _onednn_supports_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


SHORT_WINDOW = 256
"""Maximum window in tokens for which a base on a CPU uses eager attention in bf16. The backward
pass of fused attention is slow on CPUs (6 % of a GPT-2 step at 128 tokens), but eager attention
would need too much memory for longer windows."""


def prepare(base: PreTrainedModel, precision: Precision | None, window: int) -> None:
    """Freeze a base and configure it for fast training.

    Args:
        base: The base, modified in place.
        precision: Precision of training. If None, no dtype is changed.
        window: Maximum length of samples in tokens.
    """
    base.requires_grad_(False).eval()
    head = base.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_contiguous)
    if precision == "bf16":
        cast_frozen(base, torch.bfloat16)
        if base.device.type == "cpu" and window <= SHORT_WINDOW:
            base.set_attn_implementation("eager")


def _contiguous(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make the input of an output head contiguous.

    The prefill of a generation passes only the last position of each sequence to the head. This
    slice is not contiguous, and PyTorch would therefore copy a frozen weight once per sequence. The
    slice of a single sequence counts as contiguous, but has the strides of the whole sequence, with
    the same effect; flattening gives it the strides of its own shape.
    """
    hidden = inputs[0].contiguous()
    return hidden.flatten().view(hidden.shape), *inputs[1:]


def cast_frozen(base: nn.Module, dtype: torch.dtype) -> None:
    """Freeze a base's linear layers and cast them to the dtype in which autocast computes.

    Without this cast, autocast would cast the layers at each use, with the same result. Embeddings
    and norms keep their dtype, so the dtype of the residual stream does not change. An output head
    that is tied to the embedding also keeps its dtype. A cast copy of the head's weight is stored
    for the loss, which reads the copy through `frozen_weight`.

    Args:
        base: The base, modified in place.
        dtype: Autocast's dtype.
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
    """Return a linear layer's weight in a dtype, detached from the autograd graph.

    If `cast_frozen` has stored a cast copy in this dtype, the copy is returned. The copy is
    ignored, however, if full fine-tuning has parametrized the weight.
    """
    changed = parametrize.is_parametrized(linear)
    copy = None if changed else getattr(linear, "cast_weight", None)
    weight = copy if isinstance(copy, Tensor) and copy.dtype == dtype else linear.weight
    assert isinstance(weight, Tensor)
    return weight.detach().to(dtype)

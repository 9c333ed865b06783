"""Element-wise functions of an MLP with their derivatives, in PyTorch's native kernels.

GPT-2's `gelu_new` is a chain of eight operations in transformers, and one here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import activations as hf

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """`value(p)`, and `slope(grad, p)`: the gradient that reaches p."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


_GELU_TANH = Activation(
    partial(aten.gelu, approximate="tanh"), partial(aten.gelu_backward, approximate="tanh")
)
_GELU = Activation(aten.gelu, aten.gelu_backward)
_SILU = Activation(aten.silu, aten.silu_backward)
_RELU = Activation(torch.relu, lambda grad, p: aten.threshold_backward(grad, p, 0))

_NATIVE: dict[type[nn.Module], Activation] = {
    hf.NewGELUActivation: _GELU_TANH,
    hf.GELUTanh: _GELU_TANH,
    hf.GELUActivation: _GELU,
    hf.SiLUActivation: _SILU,
    nn.SiLU: _SILU,
    nn.ReLU: _RELU,
}


def native(module: nn.Module) -> Activation:
    """The same function as a base's activation module; without a native kernel, the module."""
    known = _NATIVE.get(type(module))
    if known is not None:
        return known

    def slope(grad: Tensor, p: Tensor) -> Tensor:
        with torch.enable_grad():
            p = p.detach().requires_grad_()
            return torch.autograd.grad(module(p), p, grad)[0]

    return Activation(module, slope)

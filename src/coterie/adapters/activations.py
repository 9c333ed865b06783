"""Activation functions with their derivatives, computed by PyTorch's native kernels.

GPT-2's `gelu_new` is a chain of eight operations in transformers, but a single kernel here.
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
    """An element-wise function and its derivative."""

    value: Callable[[Tensor], Tensor]
    """Maps the input p to the function's value."""
    slope: Callable[[Tensor, Tensor], Tensor]
    """Takes two tensors: the gradient with respect to the function's value, and the input p.
    Returns the gradient with respect to p."""


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
    """Return the function that an activation module computes, and the function's derivative.

    If PyTorch has native kernels for the module's function, these kernels compute the function and
    the derivative. Otherwise, the module computes the function, and automatic differentiation
    computes the derivative.
    """
    activation = _NATIVE.get(type(module))
    if activation is not None:
        return activation

    def slope(grad: Tensor, p: Tensor) -> Tensor:
        with torch.enable_grad():
            p = p.detach().requires_grad_()
            return torch.autograd.grad(module(p), p, grad)[0]

    return Activation(module, slope)

"""A base whose linear layers get extra outputs, without the package's adapters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from coterie.adapters import detach
from coterie.methods.tensors import copied

ONE_STEP: dict[str, Any] = {"steps": 1, "batch": 2, "precision": "fp32", "learning_rate": 0.1}
ONE_STEP |= {"optimiser": {"name": "sgd"}, "schedule": "constant", "warmup": 0.0}
"""Training settings: one step of plain SGD in a round."""


@contextmanager
def with_outputs(model: Any, extra: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[Any]:
    """Add to the outputs of linear layers, by their paths, a function of their inputs."""
    detach(model)
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, inputs, output, function=function: output + function(inputs[0])
        )
        for path, function in extra.items()
    ]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def record(training: Any, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    """Return a list to which each local step appends the tensors, and the loss's gradients."""
    steps, loss = [], training._loss

    def recorded(*args: Any) -> Tensor:
        value = loss(*args)
        grads = torch.autograd.grad(value, list(tensors.values()), retain_graph=True)
        steps.append((copied(tensors), dict(zip(tensors, grads, strict=True))))
        return value

    training._loss = recorded
    return steps

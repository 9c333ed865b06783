"""A base whose linear layers get extra outputs, without the package's adapters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from coterie.adapters import detach

ONE_STEP: dict[str, Any] = {
    "optimiser": {"name": "sgd"},
    "learning_rate": 0.1,
    "schedule": "constant",
    "warmup": 0.0,
    "steps": 1,
    "batch": 2,
    "precision": "fp32",
}
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

"""A base's own dropout, which is off but for training that asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from coterie.bases.sites import walk
from coterie.errors import CoterieError


@contextmanager
def base_dropout(model: PreTrainedModel, rate: float, seed: int) -> Iterator[None]:
    """Forward passes inside drop out with this rate wherever the architecture has dropout.

    Some of it draws from torch's own generators: they are seeded inside, and untouched after.
    With the rate 0 nothing changes. Raises CoterieError if the architecture has no dropout.
    """
    if not rate:
        yield
        return
    with dropping_out(model, rate):
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield


@contextmanager
def dropping_out(model: nn.Module, rate: float) -> Iterator[None]:
    """The same, but torch's own generators are not seeded."""
    if not rate:
        yield
        return
    found = [
        (module, key, value) for _, module in walk(model) for key, value in _rates(module).items()
    ]
    if not found:
        raise CoterieError(
            f"{type(model).__name__} has no dropout of its own; remove training.base_dropout."
        )
    try:
        for module, key, _ in found:
            setattr(module, key, rate)
        model.train()
        yield
    finally:
        model.eval()
        for module, key, value in found:
            setattr(module, key, value)


def _rates(module: nn.Module) -> dict[str, float]:
    """The dropout rates of a module, by attribute: `p`, or such as Llama's `attention_dropout`."""
    if isinstance(module, nn.Dropout):
        return {"p": module.p}
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, float | int)}
    return {key: value for key, value in numbers.items() if key.endswith("dropout")}

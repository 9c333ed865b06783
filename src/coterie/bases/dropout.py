"""The dropout in a base's own architecture, which is disabled unless training enables it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from coterie.bases.sites import walk
from coterie.errors import CoterieError


@contextmanager
def base_dropout(model: PreTrainedModel, rate: float, seed: int) -> Iterator[None]:
    """Enable a base's dropout for forward passes inside the `with` block.

    Some modules draw masks from torch's global generators. The generators are therefore seeded when
    the context is entered, and restored when the context is left.

    Args:
        model: The base.
        rate: Dropout rate of all modules of the base. If the rate is 0, dropout stays disabled.
        seed: Seed of torch's global generators.

    Raises:
        CoterieError: The architecture has no dropout.
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
    """Enable a model's dropout inside the `with` block, without seeding torch's global generators.

    Raises:
        CoterieError: The architecture has no dropout.
    """
    if not rate:
        yield
        return
    originals = [
        (module, key, value) for _, module in walk(model) for key, value in _rates(module).items()
    ]
    if not originals:
        raise CoterieError(
            f"{type(model).__name__} has no dropout of its own; remove training.base_dropout."
        )
    try:
        for module, key, _ in originals:
            setattr(module, key, rate)
        model.train()
        yield
    finally:
        model.eval()
        for module, key, value in originals:
            setattr(module, key, value)


def _rates(module: nn.Module) -> dict[str, float]:
    """Return a mapping from a module's attributes to dropout rates.

    Examples of these attributes are `p` and Llama's `attention_dropout`.
    """
    if isinstance(module, nn.Dropout):
        return {"p": module.p}
    numbers = {k: v for k, v in vars(module).items() if isinstance(v, float | int)}
    return {key: value for key, value in numbers.items() if key.endswith("dropout")}

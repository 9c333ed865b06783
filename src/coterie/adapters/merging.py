"""Low-rank pairs that are merged into the weights that they correct."""

from typing import cast

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from coterie.adapters.adapter import detach
from coterie.adapters.lora import LoraLinear, LoraPair, pairs_in
from coterie.adapters.mixture import Mixture, Passed
from coterie.bases.sites import StandIn


def mergeable(model: nn.Module) -> bool:
    """Whether there are weights that compute the same as a model with its adapter.

    There are none where experts are more than one or stand beside a block, nor in a quantised base.
    """
    return all(
        isinstance(m, LoraLinear | Passed) or (isinstance(m, Mixture) and len(m.roles) == 1)
        for m in model.modules()
        if isinstance(m, StandIn)
    ) and all(p.is_floating_point() for p in model.parameters())


def merge(model: nn.Module) -> None:
    """Make every weight W that a pair corrects W + g B A, and take the stand-ins out.

    Differences from weights are added, too. What is left is a plain transformers model. No other
    adapter may use the base.
    """
    _settle(model)
    stand_ins = [m for m in model.modules() if isinstance(m, LoraLinear | Mixture)]
    detach(model)
    for module in stand_ins:
        for pair in pairs_in(module):
            _add(model.get_submodule(pair.path), module.gain, pair)


@torch.no_grad()
def _settle(model: nn.Module) -> None:
    """Add the differences of full fine-tuning to their weights; to a tied one once."""
    settled: set[nn.Parameter] = set()
    for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        for name, changed in list(cast(nn.ModuleDict, module.parametrizations).items()):
            weight, value = cast(nn.Parameter, changed.original), getattr(module, name)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            if weight not in settled:
                weight.copy_(value)
                settled.add(weight)


@torch.no_grad()
def _add(linear: nn.Module, gain: float, pair: LoraPair) -> None:
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    A, B = pair.factors(pair.rank)
    update = (gain * B @ A).to(weight.dtype)
    update = update.t() if isinstance(linear, Conv1D) else update  # which keeps its weight so
    linear.weight = nn.Parameter(weight + update, requires_grad=False)

"""Merging of low-rank pairs into the base's weights, and faster inference without merging."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from coterie.adapters.adapter import detach
from coterie.adapters.lora import LoraLinear, LoraPair, pairs_in
from coterie.adapters.mixture import Mixture, Passed
from coterie.bases.sites import StandIn


def mergeable(model: nn.Module) -> bool:
    """Return whether an adapter can be merged into the base's weights without changing outputs.

    An adapter cannot be merged if it has several experts per layer, if it has experts beside a
    block, or if the base is quantised.

    Args:
        model: A base with an adapter attached.
    """
    return all(
        isinstance(m, LoraLinear | Passed) or (isinstance(m, Mixture) and len(m.roles) == 1)
        for m in model.modules()
        if isinstance(m, StandIn)
    ) and all(p.is_floating_point() for p in model.parameters())


def merge(model: nn.Module) -> None:
    """Merge an adapter into the base's weights, so that every adapted weight W becomes W + g B A.

    The factor g scales the low-rank products. Differences trained by full fine-tuning are merged as
    well. The modules that the adapter replaced are put back into the base, so the result is a plain
    transformers model. Do not attach other adapters to the base afterwards.

    Args:
        model: A base with an adapter attached, modified in place.
    """
    _merge_differences(model)
    pairs = adapted(model)
    detach(model)
    for gain, pair in pairs:
        linear = model.get_submodule(pair.path)
        linear.weight = nn.Parameter(merged_weight(linear, gain, pair), requires_grad=False)


def adapted(model: nn.Module) -> list[tuple[float, LoraPair]]:
    """Return the low-rank pairs on a base's linear layers, each with the factor g that scales it.

    Args:
        model: A base with an adapter attached.
    """
    stand_ins = [m for m in model.modules() if isinstance(m, LoraLinear | Mixture)]
    return [(module.gain, pair) for module in stand_ins for pair in pairs_in(module)]


@torch.no_grad()
def _merge_differences(model: nn.Module) -> None:
    """Add the differences of full fine-tuning to the base's weights.

    If several tied weights share a difference, the difference is added only once.
    """
    merged: set[nn.Parameter] = set()
    for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        for name, changed in list(cast(nn.ModuleDict, module.parametrizations).items()):
            weight, value = cast(nn.Parameter, changed.original), getattr(module, name)
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            if weight not in merged:
                weight.copy_(value)
                merged.add(weight)


@torch.no_grad()
def merged_weight(linear: nn.Module, gain: float, pair: LoraPair) -> Tensor:
    """Return the weight W + g B A of a linear layer, in the dtype of W.

    The sum is computed in float64 where the device supports it, and rounded once.

    Args:
        linear: The layer, which is not changed.
        gain: The factor g.
        pair: The low-rank pair with the factors A and B.
    """
    weight = linear.weight
    assert isinstance(weight, nn.Parameter)
    exact = torch.float32 if weight.device.type == "mps" else torch.float64
    A, B = (factor.to(exact) for factor in pair.factors(pair.rank))
    update = gain * B @ A
    update = update.t() if isinstance(linear, Conv1D) else update  # Conv1D's weight is (in, out)
    return (weight.to(exact) + update).to(weight.dtype)


def fix_factors(model: nn.Module) -> None:
    """Cast and join a model's LoRA factors once, in place, for inference only.

    Without this function, each forward pass casts the factors to the dtype of the base and joins
    the factors of a mixture's experts; the results are the same. If the base has parameters of
    several dtypes, the factors are not cast, because the dtype of a layer's input is unknown.

    Args:
        model: A base with an adapter attached. The adapter's factors must not change afterwards.
    """
    pairs = [module for module in model.modules() if isinstance(module, LoraPair)]
    trained = {id(tensor) for pair in pairs for tensor in pair.parameters()}
    dtypes = {p.dtype for p in model.parameters() if not p.requires_grad and id(p) not in trained}
    if len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
        for pair in pairs:
            pair.to(next(iter(dtypes)))
    for module in model.modules():
        if isinstance(module, Mixture):
            module.fixed = {}

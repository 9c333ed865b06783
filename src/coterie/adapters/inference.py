"""Prepares adapters for fast inference."""

from torch import nn

from coterie.adapters.lora import LoraPair
from coterie.adapters.mixture import Mixture


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

"""Full fine-tuning: every weight of a base is trained, as its difference from the base's own.

Many clients share one base in memory, so each holds its differences, which begin at zero. Weight
decay therefore pulls towards the base, not towards zero.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.adapters.adapter import attach, detach
from coterie.adapters.layout import Role
from coterie.adapters.part import Part
from coterie.errors import CoterieError


class Difference(nn.Module):
    """weight + difference, in the difference's dtype; both of the same shape."""

    def __init__(self, difference: nn.Parameter) -> None:
        super().__init__()
        self.difference = difference

    def forward(self, weight: Tensor) -> Tensor:
        """Of a base's weight, what the client has in its place."""
        return weight.to(self.difference.dtype) + self.difference


class FullAdapter:
    """One client's differences from all weights of a base; a tied weight has one.

    Raises CoterieError if the base is quantised.
    """

    def __init__(self, base: nn.Module) -> None:
        detach(base)
        parts: dict[str, Part] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}
        """By part: the modules' paths, and what they call the weight."""
        names: dict[nn.Parameter, str] = {}
        for path, module in base.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                part = names.setdefault(weight, f"weight/{path}.{name}")
                self._places.setdefault(part, []).append((path, name))
                if part not in parts:
                    parts[part] = Part(part, "weight", _zero_like(weight), "zero", path)
        self._parts = dict(sorted(parts.items()))

    def parts(self) -> dict[str, Part]:
        """All differences, by name, sorted."""
        return self._parts

    def parameters(self, *roles: Role) -> dict[str, nn.Parameter]:
        """Parameters by name, sorted; of these roles, or all."""
        if roles and "weight" not in roles:
            return {}
        return {name: part.parameter for name, part in self._parts.items()}

    def require_grad(self, *roles: Role) -> None:
        """Train everything, if `weight` is one of these roles, or nothing."""
        for part in self._parts.values():
            part.parameter.requires_grad_("weight" in roles)

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put the differences into a base, in place of any adapter, and return it."""
        attach(base, {})
        for part, places in self._places.items():
            for path, name in places:
                difference = Difference(self._parts[part].parameter)
                # unsafe: the base may be in bf16, what is trained is in fp32.
                parametrize.register_parametrization(
                    base.get_submodule(path), name, difference, unsafe=True
                )
        return base

    def routing(self) -> dict[str, Tensor]:
        """Nothing is routed."""
        return {}


def _zero_like(weight: nn.Parameter) -> nn.Parameter:
    if not weight.is_floating_point():
        raise CoterieError(
            "Quantised weights cannot be fine-tuned; remove base.weights, or train an adapter."
        )
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    device = "cpu" if weight.is_meta else weight.device
    return nn.Parameter(torch.zeros(weight.shape, dtype=dtype, device=device))

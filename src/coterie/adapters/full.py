"""Full fine-tuning: every weight of a base is trained, as its difference from the base's own.

Many clients share one base in memory, so each holds its differences, which begin at zero. Weight
decay therefore pulls towards the base, not towards zero.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.adapters.adapter import Trainable, detach
from coterie.adapters.parameter import Parameter, trained_beside
from coterie.errors import CoterieError


class Difference(nn.Module):
    """weight + difference, in the difference's dtype; both of the same shape."""

    def __init__(self, difference: nn.Parameter) -> None:
        super().__init__()
        self.difference = difference

    def forward(self, weight: Tensor) -> Tensor:
        """Of a base's weight, what the client has in its place."""
        return weight.to(self.difference.dtype) + self.difference


class FullAdapter(Trainable):
    """One client's differences from all weights of a base; a tied weight has one.

    Raises CoterieError if the base is quantised.
    """

    def __init__(self, base: nn.Module) -> None:
        detach(base)
        parameters: dict[str, Parameter] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}
        """By parameter: the modules' paths, and what they call the weight."""
        names: dict[nn.Parameter, str] = {}
        for path, module in base.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                key = names.setdefault(weight, f"weight/{path}.{name}")
                self._places.setdefault(key, []).append((path, name))
                if key not in parameters:
                    parameters[key] = Parameter(key, "weight", _zero_like(weight), "zero", path)
        super().__init__(parameters.values())

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        """Put the differences into a base, in place of any adapter, and return it."""
        super().attach(base)
        for key, places in self._places.items():
            for path, name in places:
                difference = Difference(self.parameters()[key].tensor)
                # unsafe: the base may be in bf16, what is trained is in fp32.
                parametrize.register_parametrization(
                    base.get_submodule(path), name, difference, unsafe=True
                )
        return base


def _zero_like(weight: nn.Parameter) -> nn.Parameter:
    if not weight.is_floating_point():
        raise CoterieError(
            "Quantised weights cannot be fine-tuned; remove base.weights, or train an adapter."
        )
    return nn.Parameter(torch.zeros(weight.shape, **trained_beside(weight)))

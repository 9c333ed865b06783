"""Full fine-tuning: for every weight of a base, a client trains a difference from the weight.

Many clients share one base in memory. Each client has its own differences, which start at zero.
Weight decay therefore pulls weights towards the base's weights, not towards zero.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.adapters.adapter import Trainable, detach
from coterie.adapters.parameter import Parameter, trained_beside
from coterie.errors import CoterieError


class Difference(nn.Module):
    """A parametrization that adds a trained difference to a weight of the same shape."""

    def __init__(self, difference: nn.Parameter) -> None:
        super().__init__()
        self.difference = difference

    def forward(self, weight: Tensor) -> Tensor:
        """Return the sum of the base's weight and the difference, in the difference's dtype."""
        return weight.to(self.difference.dtype) + self.difference


class FullAdapter(Trainable):
    """A client's adapter for full fine-tuning, which adds a trained difference to each weight.

    Tied weights share one difference.

    Args:
        base: The base. The differences have the shapes and the device of its weights, which may be
            the meta device.

    Raises:
        CoterieError: The base is quantised.
    """

    def __init__(self, base: nn.Module) -> None:
        detach(base)
        parameters: dict[str, Parameter] = {}
        self._places: dict[str, list[tuple[str, str]]] = {}
        """A mapping from the name of each difference to the weights that are changed by the
        difference. Each weight is specified by the path of a module and an attribute of the module.
        Tied weights share one difference."""
        names: dict[nn.Parameter, str] = {}
        for path, module in base.named_modules():
            for name, weight in module.named_parameters(recurse=False):
                key = names.setdefault(weight, f"weight/{path}.{name}")
                self._places.setdefault(key, []).append((path, name))
                if key not in parameters:
                    parameters[key] = Parameter(key, "weight", _zero_like(weight), "zero", path)
        super().__init__(parameters.values())

    def attach(self, base: PreTrainedModel) -> PreTrainedModel:
        super().attach(base)
        for key, places in self._places.items():
            for path, name in places:
                difference = Difference(self.parameters()[key].tensor)
                # unsafe permits a change of dtype: the base may be bf16, but differences are fp32.
                parametrize.register_parametrization(
                    base.get_submodule(path), name, difference, unsafe=True
                )
        return base


def _zero_like(weight: nn.Parameter) -> nn.Parameter:
    if not weight.is_floating_point():
        raise CoterieError(
            "Quantised weights cannot be fine-tuned; remove base.weights, or train an adapter."
        )
    options = {**trained_beside(weight), "device": weight.device}
    return nn.Parameter(torch.zeros(weight.shape, **options))

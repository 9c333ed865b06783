"""Loading of a base's weights, with the check that the base is whole.

transformers only warns if weights are missing (and draws them at random), have another shape, or
are not used. Here, each of these faults is an error.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from coterie.errors import CoterieError

BUFFERS = re.compile(r"\.(attn|attention)\.(bias|masked_bias)$|\.inv_freq$|\.position_ids$")
"""Names of causal masks and position tensors in old checkpoints (models now compute them)."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def load_whole(name: str, location: str, **options: Any) -> PreTrainedModel:
    """Load a causal language model, and check that every weight comes from the checkpoint.

    No other function of Coterie loads the weights of a model with transformers.

    Args:
        name: The base's name in the run file.
        location: A folder, or a name on the Hugging Face hub.
        options: Options of `from_pretrained`.

    Raises:
        CoterieError: Tensors are missing, have a wrong shape or are not finite, or the checkpoint
            has layers or biases that the configuration does not describe.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        location, ignore_mismatched_sizes=True, output_loading_info=True, **options
    )
    model, report = loaded
    _check_report(name, model, report)
    return model


def _check_report(name: str, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """Check that every weight of a loaded base comes from the checkpoint and is finite.

    Args:
        name: The base's name in the run file.
        model: The base, directly after loading.
        report: The loading report of transformers (`output_loading_info`).
    """
    if missing := sorted(report["missing_keys"]):
        raise CoterieError(
            f"The checkpoint of the base {name!r} is incomplete: it lacks {listed(missing)}; "
            "download it again, or correct config.json."
        )
    if mismatched := sorted(report["mismatched_keys"]):
        tensor, stored, expected = mismatched[0]
        raise CoterieError(
            f"The checkpoint of the base {name!r} does not match its config.json: {tensor} has "
            f"shape {list(stored)} in the checkpoint, but {list(expected)} according to "
            "config.json; use the config.json that belongs to the checkpoint."
        )
    if surplus := sorted(_surplus(model, report["unexpected_keys"])):
        raise CoterieError(
            f"The checkpoint of the base {name!r} does not match its config.json, which does not "
            f"describe {listed(surplus)}; use the config.json that belongs to the checkpoint."
        )
    for tensor, values in _floats(model):
        if not all(bound.isfinite() for bound in values.aminmax()):
            raise CoterieError(
                f"The checkpoint of the base {name!r} is damaged: {tensor} contains values that "
                "are not finite (NaN or infinity); download it again."
            )


def _surplus(model: PreTrainedModel, unexpected: Iterable[str]) -> Iterator[str]:
    """Yield the unexpected tensors which prove that config.json does not match the checkpoint.

    There are two kinds of proof. The first kind is an unexpected tensor, such as a bias, that
    belongs to a module of the model. The second kind is an unexpected tensor whose name would match
    the name of one of the model's tensors if the numbers in both names were ignored. An example is
    a tensor of an additional layer. All other unexpected tensors are ignored. The buffers of old
    checkpoints are always ignored.
    """
    modules = {path for path, _ in model.named_modules() if path}
    patterns = {NUMBER.sub("*", tensor) for tensor in model.state_dict()}
    for tensor in unexpected:
        inside = tensor.rpartition(".")[0] in modules or NUMBER.sub("*", tensor) in patterns
        if inside and not BUFFERS.search(tensor):
            yield tensor


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values of each weight.

    For a quantised weight, the scales are yielded instead of the values. Weights without
    floating-point values or scales are left out.
    """
    for tensor, weight in model.named_parameters():
        values = weight.detach()
        if (scales := getattr(weight, "SCB", None)) is not None:  # int8
            values = scales
        elif (state := getattr(weight, "quant_state", None)) is not None:  # nf4
            values = state.offset
        if values.is_floating_point() and values.numel():
            yield tensor, values


def listed(tensors: Sequence[str], shown: int = 3) -> str:
    """Format the names of tensors, of which at most `shown` are written out."""
    more = f" and {len(tensors) - shown} more tensors" if len(tensors) > shown else ""
    return ", ".join(tensors[:shown]) + more

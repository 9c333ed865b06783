"""Existing LoRA adapters in PEFT's format, which are merged into a base when it is loaded.

Every method then trains on the sum of the base and the adapter, as on any other base.
"""

import logging
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases.checks import ADAPTER, read_object, refuse_pointer
from coterie.bases.patterns import matching
from coterie.bases.precision import Precision
from coterie.bases.spec import BaseSpec
from coterie.errors import CoterieError
from coterie.files import expanded, read_file, refuse_special

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

log = logging.getLogger(__name__)

WEIGHTS = "adapter_model.safetensors"
FILES = (ADAPTER, WEIGHTS)
NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
)
"""Settings with which an adapter is more than a low-rank change of linear layers or embeddings."""
KEEPS_BASE = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base's own weights unchanged."""
ALL_LINEAR = "all-linear"
"""PEFT's name for all linear layers, which can stand in the place of a pattern."""
MOST_LOST = 0.1
"""The largest share of an adapter that rounding may lose without a warning."""


def read_lora(folder: Path) -> "LoraConfig":
    """Read and check the configuration of a LoRA adapter.

    Args:
        folder: The adapter's folder, which PEFT's `save_pretrained` wrote.

    Raises:
        CoterieError: The folder or one of its files is missing, or the adapter is not plain LoRA.
    """
    if not folder.is_dir():
        raise CoterieError(f"`adapter`: there is no folder {folder}; correct the path.")
    for name in FILES:
        if not (folder / name).is_file():
            raise CoterieError(
                f"{folder} contains no LoRA adapter that Coterie can read: the file {name} is "
                "missing; PEFT's save_pretrained writes it."
            )
    refuse_pointer(folder / WEIGHTS)
    values = read_object(folder / ADAPTER)
    if (kind := values.get("peft_type")) != "LORA":
        raise CoterieError(
            f"{folder} contains a PEFT adapter of the type {kind!r}; `adapter` accepts only LoRA."
        )
    settings = [name for name in NOT_PLAIN if values.get(name)]
    if values.get("bias", "none") != "none":
        settings.append("bias")
    if values.get("init_lora_weights", True) not in KEEPS_BASE:
        settings.append("init_lora_weights")
    if settings:
        raise CoterieError(
            f"The adapter in {folder} is more than plain LoRA ({settings[0]}: "
            f"{values[settings[0]]!r}); merge it into its base with PEFT (merge_and_unload), and "
            "set `base` to the merged model."
        )
    from peft import LoraConfig

    try:
        config: Any = LoraConfig.from_pretrained(str(folder))
    except (TypeError, ValueError) as error:
        raise CoterieError(
            f"{folder / ADAPTER} is not a valid LoRA configuration: {shorten(str(error), 300)}"
        ) from error
    return config


def lora_digests(specs: Iterable[BaseSpec], root: Path) -> dict[str, dict[str, str]]:
    """Hash the existing LoRA adapters that are merged into bases.

    Args:
        specs: The bases.
        root: The folder that relative paths of adapters start from.

    Returns:
        A mapping with the hash of each adapter's files, by the adapter's folder, under the key
        `adapters`; an empty mapping if no base has such an adapter.

    Raises:
        CoterieError: A folder contains no LoRA adapter.
    """
    folders = sorted({spec.adapter for spec in specs if spec.adapter is not None})
    digests = {path: _digest(root / expanded(path)) for path in folders}
    return {"adapters": digests} if digests else {}


def _digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's files, which shows whether they have changed."""
    read_lora(folder)
    digest = sha256()
    for name in FILES:
        digest.update(read_file(folder / name))
    return digest.hexdigest()


def merge_lora(
    model: PreTrainedModel, spec: BaseSpec, folder: Path, precision: Precision | None
) -> None:
    """Add a LoRA adapter to the weights of a base in place.

    The sums are computed in float32, and rounded once to the dtype of the weights. A warning is
    logged if the adapter names another base, or if rounding loses a noticeable part of it.

    Args:
        model: The base.
        spec: The base's name and format.
        folder: The adapter's folder.
        precision: Precision of training. With bf16, linear layers compute in bfloat16 whatever
            their dtype.

    Raises:
        CoterieError: The base is quantised, or the adapter is not plain LoRA, is damaged, or does
            not fit the base.
    """
    from peft.tuners.lora import LoraLayer

    config = read_lora(folder)
    if spec.quantised:
        raise CoterieError(
            f"The adapter in {folder} cannot be merged into a base in {spec.weights}; merge it "
            "into the base without quantisation with PEFT (merge_and_unload), and set `base` to "
            "the merged model."
        )
    trained_on = str(config.base_model_name_or_path or "")
    if trained_on and Path(trained_on).name.lower() != Path(spec.name).name.lower():
        log.warning(
            f"The adapter in {folder} was trained on {trained_on}, but the base is {spec.name}."
        )
    peft_model = _attach(model, config, folder, spec.name)
    shared = _shared(model)
    lost = total = torch.zeros((), dtype=torch.float64)
    layers: list[tuple[str, Any]] = [
        (path, layer) for path, layer in model.named_modules() if isinstance(layer, LoraLayer)
    ]
    for path, layer in layers:
        weight: Tensor = _weight(layer)
        if id(weight) in shared:
            raise CoterieError(
                f"The adapter in {folder} changes {path}, whose weights the base {spec.name!r} "
                "uses twice, for the embedding and for the output; such an adapter cannot be "
                "merged."
            )
        change, before = layer.get_delta_weight("default"), weight.detach().clone()
        layer.merge()
        if not all(bound.isfinite() for bound in weight.detach().aminmax()):
            raise CoterieError(
                f"The adapter in {folder} is damaged: it contains values that are not finite (NaN "
                "or infinity)."
            )
        dtype = torch.bfloat16 if precision == "bf16" else weight.dtype
        effect = weight.detach().to(dtype).float() - before.to(dtype).float()
        lost = lost + (effect - change.float()).norm().cpu().double() ** 2
        total = total + change.norm().cpu().double() ** 2
    peft_model.unload()
    if (share := (lost / total).sqrt().item()) > MOST_LOST:
        log.warning(
            f"Rounding to bfloat16 changes the adapter in {folder} by {share:.0%}, because its "
            "values are small beside the base's; set training.precision to fp32 to use it exactly."
        )


def _attach(model: PreTrainedModel, config: "LoraConfig", folder: Path, base: str) -> "PeftModel":
    """Attach an adapter to a base with PEFT.

    Raises:
        CoterieError: The adapter does not fit the base, or is damaged.
    """
    from peft import PeftModel
    from peft.utils import set_peft_model_state_dict

    try:
        refuse_special(folder / WEIGHTS)
        _resolve_patterns(config, model, folder)
        weights = {name: values.float() for name, values in load_file(folder / WEIGHTS).items()}
        with catch_warnings(action="ignore"):  # of PEFT, about calls that it makes itself
            peft_model = PeftModel(model, config, low_cpu_mem_usage=True)
        report: Any = set_peft_model_state_dict(peft_model, weights, low_cpu_mem_usage=True)
    except SafetensorError as error:
        raise CoterieError(f"{folder / WEIGHTS} is damaged or incomplete: {error}.") from error
    except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
        reason = shorten(str(error), 300)
        raise CoterieError(
            f"The adapter in {folder} does not fit the base {base!r}: {reason}"
        ) from error
    missing = [name for name in report.missing_keys if ".lora_" in name]
    unfit = f"The adapter in {folder} does not fit the base {base!r}:"
    if report.unexpected_keys:
        name = min(report.unexpected_keys)
        raise CoterieError(f"{unfit} the tensor {name} of {WEIGHTS} belongs to no layer.")
    if missing:
        raise CoterieError(f"{unfit} {WEIGHTS} lacks the tensor {min(missing)}.")
    return peft_model


def _resolve_patterns(config: Any, model: PreTrainedModel, folder: Path) -> None:
    """Replace the regular expressions in an adapter's settings by the names that they match.

    PEFT would match them with `re`, which can take exponential time.

    Raises:
        CoterieError: An expression is invalid, takes too long or matches nothing.
    """
    paths = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    names = [path for path in paths if path]
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, str) and pattern.lower() != ALL_LINEAR:
            setattr(config, key, matching(pattern, names, f"{folder / ADAPTER}, {key}"))
    if config.target_modules == [] and not config.target_parameters:
        raise CoterieError(f"{folder / ADAPTER}, target_modules: no module of the base matches.")
    for key in ("rank_pattern", "alpha_pattern"):
        rest, resolved = names, dict[str, Any]()
        for pattern, value in dict(getattr(config, key, None) or {}).items():
            ending = rf"(.*\.)?({pattern})$"
            matched = set(matching(ending, rest, f"{folder / ADAPTER}, {key}"))
            rest = [name for name in rest if name not in matched]  # the first pattern counts
            if matched:  # a name is matched from its beginning
                resolved[rf"(?<!.)(?:{'|'.join(map(re.escape, sorted(matched)))})"] = value
        setattr(config, key, resolved)
    layers = getattr(config, "layers_pattern", None) or []
    for name in [layers] if isinstance(layers, str) else layers:
        if not re.fullmatch(r"[\w.]*", str(name)):
            raise CoterieError(
                f"{folder / ADAPTER}, layers_pattern: {name!r} is not the name of a module."
            )


def _weight(layer: Any) -> Tensor:
    """Return the weight of the base that a LoRA layer of PEFT changes."""
    if hasattr(layer, "get_param"):  # a parameter of a module that is not a linear layer
        return layer.get_param()
    return layer.get_base_layer().weight


def _shared(model: PreTrainedModel) -> set[int]:
    """Return the ids of the parameters that several modules of a model use."""
    ids = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {key for key in ids if ids.count(key) > 1}

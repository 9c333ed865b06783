"""Loading of bases: frozen pretrained causal language models with their tokenizers."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from coterie.bases.checks import (
    CONFIG,
    check_architecture,
    check_causal,
    check_files,
    check_numbers,
    check_tokenizer,
    check_tokenizer_files,
    check_vocabulary,
    check_weights,
    limited_modules,
)
from coterie.bases.devices import Device, devices_of, placement
from coterie.bases.gguf import SMOLLM2, converted, find_gguf, packaged_smollm2
from coterie.bases.hub import check_all, check_snapshot, snapshot
from coterie.bases.lora import merge_lora, read_lora
from coterie.bases.precision import Precision, prepare
from coterie.bases.spec import BaseSpec
from coterie.bases.weights import check_weights_fit, format_of, settle
from coterie.bases.whole import load_whole
from coterie.errors import CoterieError, enough_memory, ran_out_of_memory, reason_of
from coterie.files import expanded, sha256_of

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Loading options that forbid running Python code shipped with a base. By default, transformers
would ask the user."""
EMBEDDED = Path(__file__).parent.parent / "assets"
"""Folder of the bases shipped with Coterie; each base has a subfolder with the base's name."""


@dataclass(frozen=True)
class Base:
    """A frozen model with its tokenizer, shared by all clients in a process.

    A client's adapter is attached to the model while the client computes, and then detached.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    precision: Precision
    """Precision of forward passes; bf16 uses autocast."""
    device: torch.device
    """Device on which input tokens must be: the model's device, or the first of several devices."""

    @cached_property
    def digest(self) -> str:
        """A hash of the loaded weights, which shows whether machines have the same base."""
        digest = blake2b(digest_size=8)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def context_token(self) -> int:
        """Id of the token that precedes every text; see the function `context_token`."""
        return context_token(self.tokenizer)


def context_token(tokenizer: Tokenizer) -> int:
    """Return the id of the token that precedes every text.

    The token is the beginning-of-text token or, if the tokenizer lacks it, the end-of-text token.

    Raises:
        CoterieError: The tokenizer has neither of these tokens.
    """
    token = tokenizer.bos_token_id
    if token is None:
        token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise CoterieError(
            "The base's tokenizer has neither a beginning-of-text nor an end-of-text token."
        )
    return token


def load_base(
    base: BaseSpec | str,
    precision: Precision | None,
    window: int,
    root: Path = Path(),
    device: Device = "auto",
) -> Base:
    """Load a frozen base with dropout disabled.

    If `base` specifies a format, the weights are loaded in this format. Otherwise, if `precision`
    is fp32, they are loaded in float32. In all other cases, they are loaded in the format of the
    checkpoint, but float16 becomes bfloat16. After loading, if `precision` is bf16, linear layers
    in float32 are cast to bfloat16.

    If `base` has an adapter, the adapter is merged into the loaded weights (see `merge_lora`).

    Args:
        base: A built-in base, a folder, or a name on the Hugging Face hub.
        precision: Precision of training. If None, the base is used in the format in which it was
            loaded, without autocast.
        window: Maximum length of samples in tokens.
        root: Folder to which relative paths refer.
        device: Device or devices of the base.

    Raises:
        CoterieError: The base or a device does not exist, the base is incomplete (see
            `coterie.bases.checks`), the adapter does not fit it, the base's context is shorter than
            the window, or the weights exceed the memory of the devices.
    """
    spec = BaseSpec.model_validate(base)
    devices, tokenizer = devices_of(device), load_tokenizer(spec, root)
    check_base(spec, root)
    skeleton, formats = load_skeleton(spec, root), format_of(spec, precision)
    check_weights_fit(spec, skeleton, formats["dtype"], devices)
    options = {
        **formats,
        "use_safetensors": True,
        "device_map": placement(skeleton, devices) if len(devices) > 1 else {"": devices[0]},
    }
    quantise = ["base.weights: nf4"] if spec.weights != "nf4" else []
    remedies = [*quantise, "`base` to a smaller one"]
    with enough_memory(f"the base {spec}", lambda: remedies):
        model = _loading(spec, root, partial(load_whole, spec.name), **options)
        check_vocabulary(spec.name, tokenizer, model)
        settle(model)
        if spec.adapter is not None:
            merge_lora(model, spec, root / expanded(spec.adapter), precision)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise CoterieError(
            f"data.window is {window} tokens, but the base {spec.name!r} reads at most {longest}."
        )
    prepare(model, precision, window)
    return Base(model, tokenizer, precision or "fp32", devices[0])


class Bases(dict[BaseSpec, Base]):
    """A cache of bases for one precision. Each base is loaded when it is first accessed."""

    def __init__(
        self, precision: Precision, window: int, root: Path = Path(), device: Device = "auto"
    ) -> None:
        super().__init__()
        self._arguments = precision, window, root, device

    def __missing__(self, spec: BaseSpec) -> Base:
        """Load a base and cache it."""
        base = self[spec] = load_base(spec, *self._arguments)
        return base


def load_skeleton(base: BaseSpec | str, root: Path = Path()) -> PreTrainedModel:
    """Build a base on the meta device, without weights. A server needs no weights."""
    spec = BaseSpec.model_validate(base)
    config = _config(spec, root)
    with limited_modules(_config_of(spec)), torch.device("meta"):
        build = AutoModelForCausalLM.from_config
        return _loading(spec, root, lambda _, **options: build(config, **options))


def check_base(base: BaseSpec, root: Path = Path()) -> None:
    """Check a base's configuration, and the configuration of the adapter to merge into it.

    If the base is a local folder, also check the headers of the weight files.
    """
    if base.adapter is not None:
        read_lora(root / expanded(base.adapter))
    _config(base, root)
    if folder := _folder(base, root):
        check_weights(folder)


def _config(base: BaseSpec, root: Path) -> PreTrainedConfig:
    """Load a base's configuration.

    Raises:
        CoterieError: The base cannot be loaded, or is not a causal language model.
    """
    if folder := _folder(base, root):
        check_files(folder)
    check_architecture(base.name, _raw_config(base, root))
    config = _loading(base, root, AutoConfig.from_pretrained)
    check_causal(base.name, config)
    return config


def _raw_config(base: BaseSpec, root: Path) -> dict[str, Any]:
    """Return the content of a base's config.json; empty if there is no config.json.

    Every loader that builds a configuration from the file must be preceded by this function.

    Raises:
        CoterieError: The file cannot be read, or contains a number that no model has.
    """
    raw, _ = _loading(base, root, PreTrainedConfig.get_config_dict)
    check_numbers(_config_of(base), raw)
    return raw


def _config_of(base: BaseSpec) -> str:
    """Return the phrase for a base's configuration in error messages."""
    return f"The config.json of the base {base.name!r}"


def load_tokenizer(base: BaseSpec | str, root: Path = Path()) -> Tokenizer:
    """Load the fast tokenizer of a base.

    Args:
        base: A built-in base, a folder, or a name on the Hugging Face hub.
        root: Folder to which relative paths refer.

    Raises:
        CoterieError: The base does not exist, it has no fast tokenizer, or its tokenizer has only
            special tokens.
    """
    spec = BaseSpec.model_validate(base)
    if folder := _folder(spec, root):
        check_files(folder)
        check_tokenizer_files(folder)
    if folder is None or (folder / CONFIG).is_file():  # the tokenizer's loader builds it
        _raw_config(spec, root)
    tokenizer = _loading(spec, root, AutoTokenizer.from_pretrained)
    if folder is None:
        check_snapshot(spec, check_tokenizer_files)
    check_tokenizer(spec.name, tokenizer)
    if not tokenizer.is_fast:
        raise CoterieError(f"The base {spec.name!r} has no fast tokenizer (tokenizer.json).")
    tokenizer.name_or_path = spec.name  # as in the run file, without the path of this machine
    return tokenizer


def is_local(name: str) -> bool:
    """Return whether a base's name is a local folder or GGUF file, and not a built-in base."""
    return not is_shipped(name) and (os.path.isdir(name) or find_gguf(Path(name)) is not None)


def is_shipped(name: str) -> bool:
    """Return whether a base's name is that of a built-in base."""
    return name in _shipped()


def _shipped() -> list[str]:
    """Return the names of the built-in bases, including the one that a package contains."""
    return sorted([*(path.parent.name for path in EMBEDDED.glob("*/config.json")), SMOLLM2])


def place(name: str, root: Path) -> str:
    """Return the folder of a built-in or local base, or the unchanged name of any other base.

    A base in GGUF is converted when its folder is first requested.

    Raises:
        CoterieError: A base in GGUF cannot be converted.
    """
    if name == SMOLLM2:
        return str(converted(packaged_smollm2()))
    if file := find_gguf(root / name):
        return str(converted(file))
    folders = (EMBEDDED / name, root / name)
    # Unlike Path.is_dir, os.path.isdir accepts names that are invalid as paths.
    return next((str(folder) for folder in folders if os.path.isdir(folder)), name)


def _folder(base: BaseSpec, root: Path) -> Path | None:
    """Return the folder of a base on this machine, or None for a base on the hub."""
    location = place(base.name, root)
    return Path(location) if os.path.isdir(location) else None


def weights_digest(base: BaseSpec, root: Path) -> str | None:
    """Return a hash of the weight files of a base in a folder; None for a base on the hub."""
    if (folder := _folder(base, root)) is None:
        return None
    digest = blake2b(digest_size=16)
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def _find(base: BaseSpec, location: str) -> None:
    """Raise an exception at once if a base does not exist.

    Without this check, the loaders of transformers would retry for a minute.

    Raises:
        OSError: The base could not be downloaded from the hub.
        ValueError: The base's name is not a valid name on the hub.
    """
    if os.path.isdir(location) or isinstance(
        try_to_load_from_cache(base.name, "config.json", revision=base.revision), str
    ):
        return
    try:
        HfApi().model_info(base.name, revision=base.revision, timeout=10)
    except Exception as error:  # exception classes depend on the hub's client and the network
        raise OSError(f"{base} could not be downloaded from the Hugging Face hub.") from error


def _loading(base: BaseSpec, root: Path, load: Callable[..., Any], **options: Any) -> Any:
    """Call one of transformers' loaders for a base, and return its result.

    Raises:
        CoterieError: The loader failed for a reason other than a lack of memory. If memory ran out,
            the loader's exception is raised unchanged.
    """
    location, name = place(base.name, root), base.name
    revision = {} if base.revision is None else {"revision": base.revision}
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        _find(base, location)
        return load(location, **options, **revision, **NO_CODE)
    except CoterieError:
        raise
    except Exception as error:  # loaders raise many exception classes for damaged files
        if ran_out_of_memory(error):
            raise
        if _is_gated(error):
            raise CoterieError(
                f"The base {name!r} is gated: accept its licence on its page on the Hugging Face "
                "hub, and run `hf auth login` on this machine."
            ) from error
        if (folder := _folder(base, root)) is None:
            check_snapshot(base, check_all)
            folder = snapshot(base)
        if folder:
            raise CoterieError(
                f"The base {name!r} could not be loaded from {folder}: {reason_of(error)}"
            ) from error
        shipped = ", ".join(_shipped())
        at = f" at revision {base.revision}" if base.revision else ""
        offline = " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise CoterieError(
            f"The base {name!r}{at} could not be loaded: it is not a built-in base ({shipped}), "
            f"there is no folder or GGUF file {root / name}, and it could not be downloaded from "
            f"the Hugging Face hub{offline}. Without internet access, set `base` to a GGUF file or "
            "to a folder with config.json, model.safetensors and tokenizer.json."
        ) from error
    finally:
        transformers_logging.set_verbosity(before)


def _is_gated(error: BaseException | None) -> bool:
    """Return whether a loader failed because the hub requires a login and an accepted licence."""
    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__
    return error is not None

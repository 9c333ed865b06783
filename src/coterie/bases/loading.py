"""The base: a frozen pretrained causal language model with its tokenizer, one copy per process."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from textwrap import shorten
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
    check_architecture,
    check_causal,
    check_files,
    check_loaded,
    check_tokenizer,
    check_tokenizer_files,
    check_vocabulary,
    check_weights,
)
from coterie.bases.devices import Device, devices_of, placement
from coterie.bases.precision import Precision, prepare
from coterie.bases.spec import BaseSpec
from coterie.bases.weights import format_of, settle
from coterie.errors import CoterieError, enough_memory, ran_out_of_memory

NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Python that comes with a base is never run; by default, transformers would ask whether to."""
EMBEDDED = Path(__file__).parent.parent / "assets"
"""Folder of the bases that ship with Coterie, by name."""


@dataclass(frozen=True)
class Base:
    """A frozen model that all clients of a process share; adapters are attached and detached."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    precision: Precision
    """What it computes in: bf16 is autocast."""
    device: torch.device
    """Where it takes tokens; of several, the first."""

    @cached_property
    def digest(self) -> str:
        """A hash of the weights as loaded, by which machines find out that they have the same."""
        digest = blake2b(digest_size=8)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def context_token(self) -> int:
        """The token that stands before the first of a text: the tokenizer's first or last one."""
        return context_token(self.tokenizer)


def context_token(tokenizer: Tokenizer) -> int:
    """See `Base.context_token`; raises CoterieError if the tokenizer has neither."""
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
    """Load a base: an embedded one, a folder's or the Hugging Face hub's.

    Weights are in the format that `base` names, else as the checkpoint keeps them, but float16 as
    bfloat16 and all in fp32 if that is the precision of training. Where they are in fp32 and the
    precision is bf16, the linear layers' are cast. None: to be used as it is, without autocast.
    Everything is frozen, dropout is off. Raises CoterieError if there is no such base or device,
    if the base is incomplete (see `coterie.bases.checks`), or if its context is shorter than a
    window of `window` tokens.
    """
    spec = BaseSpec.model_validate(base)
    devices, tokenizer = devices_of(device), load_tokenizer(spec, root)
    check_base(spec, root)
    several = len(devices) > 1
    places = placement(load_skeleton(spec, root), devices) if several else {"": devices[0]}
    how = {
        **format_of(spec, precision),
        "use_safetensors": True,
        "device_map": places,
        "ignore_mismatched_sizes": True,  # the report names them
        "output_loading_info": True,
    }
    helps = [*(["base.weights: nf4"] if spec.weights != "nf4" else []), "`base` to a smaller one"]
    with enough_memory(f"the base {spec}", lambda: helps):
        model, report = _loading(spec, root, AutoModelForCausalLM.from_pretrained, **how)
        check_loaded(spec.name, model, report)
        check_vocabulary(spec.name, tokenizer, model)
        settle(model)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise CoterieError(
            f"data.window is {window} tokens, but the base {spec.name!r} reads at most {longest}."
        )
    prepare(model, precision, window)
    return Base(model, tokenizer, precision or "fp32", devices[0])


class Bases(dict[BaseSpec, Base]):
    """Bases for one precision; each is loaded when it is first asked for, and then kept."""

    def __init__(
        self, precision: Precision, window: int, root: Path = Path(), device: Device = "auto"
    ) -> None:
        super().__init__()
        self._how = precision, window, root, device

    def __missing__(self, spec: BaseSpec) -> Base:
        """Load it."""
        base = self[spec] = load_base(spec, *self._how)
        return base


def load_skeleton(base: BaseSpec | str, root: Path = Path()) -> PreTrainedModel:
    """The base's architecture without weights (meta tensors): all that a server needs to know."""
    spec = BaseSpec.model_validate(base)
    config = _config(spec, root)
    with torch.device("meta"):
        build = AutoModelForCausalLM.from_config
        return _loading(spec, root, lambda _, **how: build(config, **how))


def check_base(base: BaseSpec, root: Path = Path()) -> None:
    """Check a base's configuration and, of one in a folder, the headers of its weights."""
    _config(base, root)
    if folder := _folder(base, root):
        check_weights(folder)


def _config(base: BaseSpec, root: Path) -> PreTrainedConfig:
    """Load a base's configuration; raise CoterieError unless it is a causal language model's."""
    if folder := _folder(base, root):
        check_files(folder)
    raw, _ = _loading(base, root, PreTrainedConfig.get_config_dict)
    check_architecture(base.name, raw)
    config = _loading(base, root, AutoConfig.from_pretrained)
    check_causal(base.name, config)
    return config


def load_tokenizer(base: BaseSpec | str, root: Path = Path()) -> Tokenizer:
    """The tokenizer of a base; see `load_base`."""
    spec = BaseSpec.model_validate(base)
    if folder := _folder(spec, root):
        check_files(folder)
        check_tokenizer_files(folder)
    tokenizer = _loading(spec, root, AutoTokenizer.from_pretrained)
    check_tokenizer(spec.name, tokenizer)
    if not tokenizer.is_fast:
        raise CoterieError(f"The base {spec.name!r} has no fast tokenizer (tokenizer.json).")
    tokenizer.name_or_path = spec.name  # for people, who know the run file and not its place
    return tokenizer


def is_folder(name: str) -> bool:
    """Whether a base's name stands for a folder of this machine, and not for one that ships."""
    return name not in _shipped() and os.path.isdir(place(name, Path()))


def _shipped() -> list[str]:
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def place(name: str, root: Path) -> str:
    """Where a base is: a shipped one's or another folder, else its name on the hub."""
    folders = (EMBEDDED / name, root / name)
    # Unlike a Path's is_dir, this bears names that no path can have.
    return next((str(folder) for folder in folders if os.path.isdir(folder)), name)


def _folder(base: BaseSpec, root: Path) -> Path | None:
    """Return the folder of a base on this machine, None for one on the hub."""
    where = place(base.name, root)
    return Path(where) if os.path.isdir(where) else None


def _find(base: BaseSpec, where: str) -> None:
    """Raise OSError or ValueError soon if a base is nowhere; the loaders retry for a minute."""
    if os.path.isdir(where) or isinstance(
        try_to_load_from_cache(base.name, "config.json", revision=base.revision), str
    ):
        return
    try:
        HfApi().model_info(base.name, revision=base.revision, timeout=10)
    except Exception as error:  # the kinds depend on the hub's client and the network
        raise OSError(f"{base} could not be downloaded from the Hugging Face hub.") from error


def _loading(base: BaseSpec, root: Path, load: Callable[..., Any], **how: Any) -> Any:
    """Return what one of transformers' loaders makes of a base.

    Raises CoterieError for whatever the loader raises, but for too little memory.
    """
    where, name = place(base.name, root), base.name
    revision = {} if base.revision is None else {"revision": base.revision}
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        _find(base, where)
        return load(where, **how, **revision, **NO_CODE)
    except Exception as error:  # loaders and tokenizers raise nothing narrower for damaged files
        if ran_out_of_memory(error):
            raise
        if _is_gated(error):
            raise CoterieError(
                f"The base {name!r} is gated: accept its licence on its page on the Hugging Face "
                "hub, and run `hf auth login` on this machine."
            ) from error
        if folder := _folder(base, root):
            reason = shorten(str(error), 300) or type(error).__name__
            raise CoterieError(
                f"The base {name!r} could not be loaded from {folder}: {reason}"
            ) from error
        shipped = ", ".join(_shipped())
        at = f" at revision {base.revision}" if base.revision else ""
        offline = " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise CoterieError(
            f"The base {name!r}{at} could not be loaded: it is not a built-in base ({shipped}), "
            f"there is no folder {root / name}, and it could not be downloaded from the Hugging "
            f"Face hub{offline}. Without internet access, set `base` to a folder with config.json, "
            "model.safetensors and tokenizer.json."
        ) from error
    finally:
        transformers_logging.set_verbosity(before)


def _is_gated(error: BaseException | None) -> bool:
    """Whether the hub refused because somebody has not accepted a licence, or is not logged in."""
    while error is not None and not isinstance(error, GatedRepoError):
        error = error.__cause__ or error.__context__
    return error is not None

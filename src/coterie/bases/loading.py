"""The base: a frozen pretrained causal language model with its tokenizer, one copy per process."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from coterie.bases.precision import prepare
from coterie.errors import CoterieError

UNUSABLE = (OSError, ValueError, KeyError, TypeError, ImportError)
"""What loaders raise for a folder or a name that is no base."""
NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Python that comes with a base is never run; by default, transformers would ask whether to."""
EMBEDDED = Path(__file__).parent.parent / "assets"
"""Folder of the bases that ship with Coterie, by name."""


@dataclass(frozen=True)
class Base:
    """A frozen model that all clients of a process share; adapters are attached and detached."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    precision: Literal["fp32", "bf16"]
    device: torch.device

    @cached_property
    def digest(self) -> str:
        """A hash of the weights, by which machines find out that they have the same base."""
        digest = blake2b(digest_size=8)
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
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
    name: str, precision: Literal["fp32", "bf16"], window: int, root: Path = Path()
) -> Base:
    """Load a base by the name of an embedded one, a folder or the Hugging Face hub.

    Weights are in fp32, the linear layers' in bf16 if that is the precision; everything is frozen,
    dropout is off. Raises CoterieError if there is no such base, or if its context is shorter than
    a window of `window` tokens.
    """
    place = _place(name, root)
    tokenizer = load_tokenizer(name, root)
    model = _loading(
        name,
        root,
        lambda: AutoModelForCausalLM.from_pretrained(
            place, dtype="float32", use_safetensors=True, **NO_CODE
        ),
    )
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise CoterieError(
            f"data.window is {window} tokens, but the base {name!r} reads at most {longest}."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    prepare(model, precision, window)
    return Base(model, tokenizer, precision, device)


class Bases(dict[str, Base]):
    """Bases by name, in one precision; each is loaded when it is first asked for, and then kept."""

    def __init__(
        self, precision: Literal["fp32", "bf16"], window: int, root: Path = Path()
    ) -> None:
        super().__init__()
        self._how = precision, window, root

    def __missing__(self, name: str) -> Base:
        """Load it."""
        base = self[name] = load_base(name, *self._how)
        return base


def load_skeleton(name: str, root: Path = Path()) -> nn.Module:
    """The base's architecture without weights (meta tensors): all that a server needs to know."""
    place = _place(name, root)
    config = _loading(name, root, lambda: AutoConfig.from_pretrained(place, **NO_CODE))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **NO_CODE)


def load_tokenizer(name: str, root: Path = Path()) -> Tokenizer:
    """The tokenizer of a base; see `load_base`."""
    place = _place(name, root)
    tokenizer = _loading(name, root, lambda: AutoTokenizer.from_pretrained(place, **NO_CODE))
    if not tokenizer.is_fast:
        raise CoterieError(f"The base {name!r} has no fast tokenizer (tokenizer.json).")
    return tokenizer


def is_folder(name: str) -> bool:
    """Whether a base's name stands for a folder of this machine, and not for one that ships."""
    with suppress(OSError, ValueError):  # of a name that no path can have
        return name not in _shipped() and Path(_place(name, Path())).is_dir()
    return False


def _shipped() -> list[str]:
    return sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))


def _place(name: str, root: Path) -> str:
    for folder in (EMBEDDED / name, root / name):
        with suppress(OSError, ValueError):  # of a name that no path can have
            if folder.is_dir():
                return str(folder)
    return name


def _find(name: str, root: Path) -> None:
    """Raise OSError or ValueError soon if a base is nowhere; the loaders retry for a minute."""
    if Path(_place(name, root)).is_dir() or isinstance(
        try_to_load_from_cache(name, "config.json"), str
    ):
        return
    try:
        HfApi().model_info(name, timeout=10)
    except Exception as error:  # the kinds depend on the hub's client and the network
        raise OSError(f"{name!r} could not be downloaded from the Hugging Face hub.") from error


def _loading(name: str, root: Path, load: Callable[[], Any]) -> Any:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        _find(name, root)
        return load()
    except Exception as error:
        # tokenizers raises nothing narrower than Exception for a damaged file; others, such as too
        # little memory, say more about themselves than we could.
        if not isinstance(error, UNUSABLE) and type(error) is not Exception:
            raise
        shipped = ", ".join(_shipped())
        offline = " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise CoterieError(
            f"The base {name!r} could not be loaded: it is not a built-in base ({shipped}), "
            f"there is no usable model folder at {root / name}, and it could not be "
            f"downloaded from the Hugging Face hub{offline}. Without internet access, set "
            "`base` to a folder with config.json, model.safetensors and tokenizer.json."
        ) from error
    finally:
        transformers_logging.set_verbosity(before)

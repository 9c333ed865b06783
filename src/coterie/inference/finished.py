"""What runs leave behind: the models of their clients, and the configuration they began with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from coterie.adapters import merge as make_plain
from coterie.adapters import mergeable
from coterie.bases import Base, BaseSpec, Tokenizer, load_base, load_skeleton, load_tokenizer, place
from coterie.bases.devices import Device, available
from coterie.bases.precision import Precision
from coterie.bases.sites import StandIn
from coterie.config.plugins import check_plugins
from coterie.config.run import RunConfig, parse
from coterie.data.chat import chat_template
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.federation.participants import (
    EVERYONE,
    NOTHING,
    Participant,
    client_context,
    server_context,
)
from coterie.inference.kept import bring_back
from coterie.methods.contract import SERVER, ClientSide, Method
from coterie.runs import RunFolder


def load(
    path: str | Path, client: str, *, method: Method | None = None, merge: bool | None = None
) -> PreTrainedModel:
    """The personal model of a client of a run: a transformers model with its adapter.

    Its weights are in the format of the base; none are cast as in training. Where clients keep
    their best models, it is that: the base alone if that was the best. `.generate()` works on it;
    its tokenizer is `coterie.tokenizer(path, client)`. "server" is the server with a model of its
    own. `method` is needed for a run whose method is not registered. A pooled run has one model,
    whatever the client.

    merge: make LoRA pairs, or differences from weights, part of the weights, rounded to their
    format, so that `save_pretrained` writes a plain model. Default: where weights are in fp32, and
    no layer has several experts. Without, `save_pretrained` raises CoterieError. With a soft
    prompt, it is PEFT's model. Raises CoterieError if experts or quantised weights cannot be merged
    that were to be.
    """
    folder = RunFolder(Path(path))
    return model_of(folder, recorded(folder, method), client, merge)


def model_of(
    folder: RunFolder, config: RunConfig, client: str, merge: bool | None = None
) -> PreTrainedModel:
    """See `load`."""
    model = Loader().load(folder, config, client).model()
    if not any(isinstance(m, StandIn) or is_parametrized(m) for m in model.modules()):
        return model  # the base alone, or behind a soft prompt
    can = mergeable(model)
    if merge and not can:
        raise CoterieError(f"This model cannot be merged: {NO_FOLDER}")
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    if can and (exact if merge is None else merge):
        make_plain(model)
        return model
    # A function of a module, so that copies and pickles have it.
    refusal: Any = partial(_refuse, UNMERGED if can else f"This model cannot be saved: {NO_FOLDER}")
    model.save_pretrained = model.push_to_hub = refusal
    return model


NO_FOLDER = (
    "a transformers folder cannot hold several experts on a layer, experts beside a block, nor an "
    "adapter of quantised weights. Keep the run's folder and load the model from it with "
    "coterie.load."
)


UNMERGED = (
    "This model keeps what it learnt apart from its weights. To save it, load it with "
    "coterie.load(..., merge=True), which rounds their sum to the format of the weights."
)


def _refuse(why: str, *_: Any, **__: Any) -> NoReturn:
    raise CoterieError(why)


class Loaded(NamedTuple):
    """A model that may share its base with others."""

    base: Base
    model: Callable[[], PreTrainedModel]
    """Puts its adapter into the base; the model is valid until another's on this base is."""


class Loader:
    """Loads models of one run or of several; those on the same base share one copy of it."""

    def __init__(self) -> None:
        self._bases: dict[tuple[BaseSpec, Precision | None, Device], Base] = {}

    def base(self, config: RunConfig, client: str) -> Base:
        """The base of a client, or of the server, of a run."""
        spec = config.base_of(client)
        precision = "fp32" if config.training.precision == "fp32" else None
        key = spec.model_copy(update={"name": place(spec.name, config.root)})
        if (how := (key, precision, config.device)) not in self._bases:
            self._bases[how] = load_base(
                spec, precision, config.data.window, config.root, config.device
            )
        return self._bases[how]

    def load(self, folder: RunFolder, config: RunConfig, client: str) -> Loaded:
        """The model of a client, or of the server; see `load` for names and errors."""
        name = EVERYONE if config.pooled else client
        if name == SERVER and config.server is not None:
            return self._load_server(folder, config)
        base, side = self.side(folder, config, name)
        if (kept := folder.find(f"kept-{name}")) is not None:
            return Loaded(base, bring_back(base, side, kept))
        return Loaded(base, side.model)

    def side(self, folder: RunFolder, config: RunConfig, client: str) -> tuple[Base, ClientSide]:
        """A client's base, and its side as the last round left it, whatever model it keeps."""
        known = sorted(folder.description["clients"])
        if client not in known:
            raise CoterieError(
                f"The run {folder.path} has no client {client!r} (clients: {', '.join(known)})."
            )
        base = self.base(config, client)
        side = config.method.client(client_context(config, base, _empty(client, base), _quiet))
        side.restore(folder.load(f"client-{client}"))
        return base, side

    def _load_server(self, folder: RunFolder, config: RunConfig) -> Loaded:
        skeleton = load_skeleton(config.base, config.root)
        names, base = folder.description["clients"], self.base(config, SERVER)
        own = _empty(SERVER, base)
        side = config.method.server(server_context(config, skeleton, names, own, _quiet))
        side.restore(folder.load("server"))

        def model() -> PreTrainedModel:
            if (found := side.model()) is None:
                raise CoterieError(f"{config.label} does not train a model on the server.")
            return found

        return Loaded(base, model)


def _empty(name: str, base: Base) -> Participant:
    """A client, or the server, with its base and without a text."""
    return Participant(name, ClientData(NOTHING, NOTHING, NOTHING), {}, base=base)


def _quiet(*_: object) -> None:
    """Nothing is logged."""


def tokenizer(path: str | Path, client: str | None = None) -> Tokenizer:
    """The tokenizer of a run's base; of a client's (or the server's), where that may be another.

    Its chat template is the one that the run rendered conversations with, if it did.
    """
    values = RunFolder(Path(path)).description["config"]
    # What these keys name may not be registered, and the tokenizer does not depend on it.
    rest = {"method": "local", "baselines": [], "aggregation": {}, "evaluation": {}}
    config = parse({**values, **rest})
    found = load_tokenizer(config.base_of(client or EVERYONE), config.root)
    if config.data.chats:
        found.chat_template = chat_template(found, config.data.chat_template).source
    return found


def recorded(folder: RunFolder, method: Method | None = None) -> RunConfig:
    """The configuration that a run began with; `method` stands for one that is not registered.

    Its device is this machine's. Raises CoterieError if a plugin is not loaded, or not the one that
    the run began with.
    """
    values, plugins = folder.description["config"], dict(folder.description.get("plugins", {}))
    if method is not None:
        plugins.pop(method.name, None)
    check_plugins(f"The run in {folder.path}", plugins)
    config = parse({**values, "method": method or values["method"]})
    return config.model_copy(update={"device": available(config.device)})

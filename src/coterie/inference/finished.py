"""Load what a run has produced: its models, their tokenizers, and its recorded configuration."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from coterie.adapters import Trainable, mergeable
from coterie.adapters import merge as make_plain
from coterie.bases import Base, BaseSpec, Tokenizer, load_base, load_skeleton, load_tokenizer, place
from coterie.bases.devices import Device, available
from coterie.bases.lora import lora_digests
from coterie.bases.precision import Precision
from coterie.bases.sites import StandIn
from coterie.config.plugins import check_plugins
from coterie.config.run import RunConfig, parse
from coterie.data.chat import chat_template
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.evaluation.gate import GATE, Gate
from coterie.exchanges.lazy import server_state
from coterie.federation.participants import (
    EVERYONE,
    NOTHING,
    Participant,
    client_context,
    server_context,
)
from coterie.inference.bundle import is_bundle, open_bundle
from coterie.inference.kept import bring_back
from coterie.methods.contract import SERVER, ClientSide, Method
from coterie.runs import RunFolder


class Loaded(NamedTuple):
    """A loaded model, which may share its base with other loaded models."""

    base: Base
    model: Callable[[], PreTrainedModel]
    """Function that attaches the adapter to the base and returns the model.

    The model is valid until the adapter of another model is attached to this base.
    """
    gate: Gate | None = None
    """The client's gate; None if the model answers all requests."""


def load(
    path: str | Path,
    client: str | None = None,
    *,
    method: Method | None = None,
    merge: bool | None = None,
    base: str | None = None,
) -> PreTrainedModel:
    """Load the personal model of a client from a run or a bundle.

    With `evaluation.keep: best`, this is the client's best model, which may be the untrained base;
    otherwise, it is the model of the last round. Weights are in float32 if the run trains in fp32,
    and in the base's number format if it trains in bf16. The function `tokenizer` loads the model's
    tokenizer.

    Args:
        path: The run folder, or the folder of a bundle (see `coterie.export`).
        client: The client's name, or "server" for the server's own model. The name is ignored for a
            pooled run, which trains a single model, and for a bundle.
        method: The run's method, if its class is not registered.
        merge: Whether to add LoRA pairs, or the weight changes of full fine-tuning, to the base's
            weights. The sums are rounded to the dtype of the weights. Merging is impossible if a
            layer has several experts, if experts run in parallel with a whole block of the base,
            or if the base is quantised. By default, an adapter is merged if merging is possible and
            the weights are in float32.
        base: The folder of a bundle's base on this machine. By default, the base is loaded by the
            name that the bundle records.

    Returns:
        A PEFT model if the adapter is a soft prompt, and a transformers model otherwise. Models of
        both classes have the method `generate`, and answer all requests themselves, without a gate.
        In a transformers model, an adapter that is not
        merged is part of the layers, and the method `save_pretrained` then raises CoterieError.

    Raises:
        CoterieError: The folder contains no run and no bundle, or the run has no such client. The
            error is also raised if a plugin of the run is not loaded or has changed, if the base of
            a bundle has changed, or if `merge` is true but the adapter cannot be merged.
    """
    return _usable(load_client(path, client, method, base).model(), merge)


def load_client(
    path: str | Path,
    client: str | None,
    method: Method | None = None,
    base: str | None = None,
) -> Loaded:
    """Load a client's model, with its gate, from a run or a bundle; see `load`."""
    folder = RunFolder(Path(path))
    if is_bundle(folder.path):
        return load_bundle(folder.path, base)
    if client is None:
        raise CoterieError(f"{path} is not a bundle; name the client whose model to load.")
    return Loader().load(folder, recorded(folder, method), client)


def model_of(
    folder: RunFolder, config: RunConfig, client: str, merge: bool | None = None
) -> PreTrainedModel:
    """Load the personal model of a client, as `load` does, with a given configuration.

    Args:
        folder: The run folder.
        config: The run's configuration, from `recorded`.
        client: The client's name, or "server" for the server's own model.
        merge: Whether to merge the adapter into the weights; see `load`.

    Returns:
        A PEFT model if the adapter is a soft prompt, and a transformers model otherwise.

    Raises:
        CoterieError: The run has no such client, or `merge` is true but the adapter cannot be
            merged.
    """
    return _usable(Loader().load(folder, config, client).model(), merge)


def load_bundle(path: Path, base: str | None = None) -> Loaded:
    """Load the model of a bundle; see `open_bundle`."""
    loaded, adapter, gate = open_bundle(path, base)
    return Loaded(loaded, partial((adapter or Trainable(())).attach, loaded.model), gate)


def _usable(model: PreTrainedModel, merge: bool | None) -> PreTrainedModel:
    """Merge a model's adapter into the weights, or let the model refuse to be saved; see `load`."""
    if not any(isinstance(m, StandIn) or is_parametrized(m) for m in model.modules()):
        return model  # the base alone, or with a soft prompt
    can_merge = mergeable(model)
    if merge and not can_merge:
        raise CoterieError(f"This model cannot be merged: {UNMERGEABLE}")
    exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    if can_merge and (exact if merge is None else merge):
        make_plain(model)
        return model
    reason = UNMERGED if can_merge else f"This model cannot be saved: {UNMERGEABLE}"
    # Not a lambda, so that the model can be copied and pickled.
    refusal: Any = partial(_refuse, reason)
    model.save_pretrained = model.push_to_hub = refusal
    return model


UNMERGEABLE = (
    "the transformers format does not support several experts on a layer, experts that run in "
    "parallel with a whole block, or an adapter on a quantised base. To use the model elsewhere, "
    "export it with `coterie export` or coterie.export; to use it here, load it with coterie.load."
)


UNMERGED = (
    "This model cannot be saved: its adapter is not merged into its weights. Export it with "
    "`coterie export` or coterie.export, or load it with coterie.load(..., merge=True), which "
    "rounds the merged weights to their dtype."
)


def _refuse(reason: str, *_: Any, **__: Any) -> NoReturn:
    raise CoterieError(reason)


class Loader:
    """A loader of models from one or several runs; models with equal bases share one base."""

    def __init__(self) -> None:
        self._bases: dict[tuple[BaseSpec, Precision | None, Device], Base] = {}

    def base(self, config: RunConfig, client: str) -> Base:
        """Load the base of a client or of the server, unless it is loaded already.

        Args:
            config: The run's configuration.
            client: The client's name, or "server".

        Returns:
            The base. The weights are in float32 if the run trains in fp32, and in the base's number
            format otherwise.
        """
        spec = config.base_of(client)
        precision = "fp32" if config.training.precision == "fp32" else None
        key = spec.model_copy(update={"name": place(spec.name, config.root)})
        if (variant := (key, precision, config.device)) not in self._bases:
            self._bases[variant] = load_base(
                spec, precision, config.data.window, config.root, config.device
            )
        return self._bases[variant]

    def load(self, folder: RunFolder, config: RunConfig, client: str) -> Loaded:
        """Load the model of a client or of the server.

        Several loaded models can share one base.

        Args:
            folder: The run folder.
            config: The run's configuration, from `recorded`.
            client: The client's name, or "server". The name is ignored for a pooled run.

        Returns:
            The base, and a function that attaches the adapter to the base.

        Raises:
            CoterieError: The run has no such client.
        """
        name = EVERYONE if config.pooled else client
        if name == SERVER and config.server is not None:
            return self._load_server(folder, config)
        base, side = self.side(folder, config, name)
        gate = Gate.restored(folder.load(f"client-{name}").parts.get(GATE), base)
        if (kept := folder.find(f"kept-{name}")) is not None:
            return Loaded(base, bring_back(base, side, kept), gate)
        return Loaded(base, side.model, gate)

    def side(self, folder: RunFolder, config: RunConfig, client: str) -> tuple[Base, ClientSide]:
        """Restore a client's method object from its state in the newest checkpoint.

        Args:
            folder: The run folder.
            config: The run's configuration, from `recorded`.
            client: The client's name.

        Returns:
            The client's base, and the client's method object in its state after the last round,
            even if the client's best model is from an earlier round.

        Raises:
            CoterieError: The run has no such client.
        """
        clients = sorted(folder.description["clients"])
        if client not in clients:
            raise CoterieError(
                f"The run {folder.path} has no client {client!r} (clients: {', '.join(clients)})."
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
        value = side.initial().restored(server_state(folder))

        def model() -> PreTrainedModel:
            if (server_model := side.model(value)) is None:
                raise CoterieError(f"{config.label} does not train a model on the server.")
            return server_model

        return Loaded(base, model)


def _empty(name: str, base: Base) -> Participant:
    """Create a participant without texts."""
    return Participant(name, ClientData(NOTHING, NOTHING, NOTHING), {}, base=base)


def _quiet(*_: object) -> None:
    """Ignore a metric; used where a function that records metrics is expected."""


def tokenizer(path: str | Path, client: str | None = None) -> Tokenizer:
    """Load the tokenizer of a run's base.

    Args:
        path: The run folder, or the folder of a bundle.
        client: A client's name, or "server", to load the tokenizer of that participant's base. By
            default, the tokenizer of the base named by the key `base` of the run file is loaded.
            The name is ignored for a bundle.

    Returns:
        A transformers tokenizer. If the run's data are conversations, the tokenizer has the chat
        template that the run used to render the conversations.

    Raises:
        CoterieError: The folder contains no run and no bundle, or the base cannot be read.
    """
    if is_bundle(Path(path)):
        return load_tokenizer(str(path))
    # The classes that these keys refer to may not be registered, and the tokenizer does not depend
    # on them.
    independent = {"method": "local", "baselines": [], "aggregation": {}, "evaluation": {}}
    config = parse_recorded(RunFolder(Path(path)), independent)
    loaded = load_tokenizer(config.base_of(client or EVERYONE), config.root)
    if config.data.chats:
        loaded.chat_template = chat_template(loaded, config.data.chat_template).source
    return loaded


def parse_recorded(folder: RunFolder, changes: Mapping[str, Any]) -> RunConfig:
    """Parse the configuration in a folder's run.json.

    Args:
        folder: The run folder.
        changes: Values that replace values of the configuration, by key.

    Raises:
        CoterieError: The folder contains no run, or this version of Coterie does not understand the
            configuration.
    """
    with folder.naming_versions():
        return parse({**folder.description["config"], **changes})


def recorded(folder: RunFolder, method: Method | None = None) -> RunConfig:
    """Read the configuration that a run began with.

    Args:
        folder: The run folder.
        method: The run's method, if its class is not registered.

    Returns:
        The configuration, with a device that is available on this machine.

    Raises:
        CoterieError: The folder contains no run, a plugin of the run is not loaded or has changed,
            or the LoRA adapter that the run began with is missing or has changed.
    """
    plugins = dict(folder.description.get("plugins", {}))
    if method is not None:
        plugins.pop(method.name, None)
    check_plugins(f"The run in {folder.path}", plugins)
    config = parse_recorded(folder, {} if method is None else {"method": method})
    hashes = folder.description.get("adapters")
    if hashes is not None and lora_digests(config.all_bases, config.root) != {"adapters": hashes}:
        raise CoterieError(
            f"The LoRA adapter that `adapter` names has changed since the run in {folder.path} "
            "began; restore it, or start a new run."
        )
    return config.model_copy(update={"device": available(config.device)})

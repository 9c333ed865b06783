"""What runs leave behind: the models of their clients, and the configuration they began with."""

from pathlib import Path

from transformers import PreTrainedModel

from coterie.bases import Tokenizer, load_base, load_skeleton, load_tokenizer
from coterie.config import RunConfig, parse
from coterie.data.tokens import ClientData
from coterie.engines.kept import kept_model
from coterie.errors import CoterieError
from coterie.federation import EVERYONE, NOTHING, Participant, client_context, server_context
from coterie.methods.contract import SERVER, Method
from coterie.methods.plugins import check_plugins
from coterie.runs import RunFolder


def load(path: str | Path, client: str, *, method: Method | None = None) -> PreTrainedModel:
    """The personal model of a client of a run: a transformers model, in fp32, with its adapter.

    Where clients keep their best models, it is that: the base alone if that was the best.
    `.generate()` works on it; its tokenizer is `coterie.tokenizer(path, client)`. "server" is the
    server with a model of its own. `method` is needed for a run whose method is not registered. A
    pooled run has one model, whatever the client.
    """
    folder = RunFolder(Path(path))
    return model_of(folder, recorded(folder, method), client)


def model_of(folder: RunFolder, config: RunConfig, client: str) -> PreTrainedModel:
    """See `load`."""
    name = EVERYONE if config.pooled else client
    if name == SERVER and config.server is not None:
        return _load_server(folder, config)
    known = sorted(folder.description["clients"])
    if name not in known:
        raise CoterieError(
            f"The run {folder.path} has no client {client!r} (clients: {', '.join(known)})."
        )
    state, kept = folder.load(f"client-{name}"), folder.find(f"kept-{name}")
    empty = _empty(config, name)
    assert empty.base is not None
    side = config.method.client(client_context(config, empty.base, empty, lambda *_: None))
    if kept is not None:
        return kept_model(empty.base, side, kept)
    side.restore(state)
    return side.model()


def _load_server(folder: RunFolder, config: RunConfig) -> PreTrainedModel:
    state = folder.load("server")
    skeleton = load_skeleton(config.base, config.root)
    names, own = folder.description["clients"], _empty(config, SERVER)
    side = config.method.server(server_context(config, skeleton, names, own, lambda *_: None))
    side.restore(state)
    model = side.model()
    if model is None:
        raise CoterieError(f"{config.label} does not train a model on the server.")
    return model


def _empty(config: RunConfig, name: str) -> Participant:
    """A client, or the server, with its base and without a text."""
    base = load_base(config.base_of(name), "fp32", config.data.window, config.root)
    return Participant(name, ClientData(NOTHING, NOTHING, NOTHING), {}, base=base)


def tokenizer(path: str | Path, client: str | None = None) -> Tokenizer:
    """The tokenizer of a run's base; of a client's (or the server's), where that may be another."""
    values = RunFolder(Path(path)).description["config"]
    config = parse({**values, "method": "local", "baselines": []})  # they may not be registered
    return load_tokenizer(config.base_of(client or EVERYONE), config.root)


def recorded(folder: RunFolder, method: Method | None = None) -> RunConfig:
    """The configuration that a run began with; `method` stands for one that is not registered.

    Raises CoterieError if a plugin is not loaded, or not the one that the run began with.
    """
    values, plugins = folder.description["config"], dict(folder.description.get("plugins", {}))
    if method is not None:
        plugins.pop(method.name, None)
    check_plugins(f"The run in {folder.path}", plugins)
    return parse({**values, "method": method or values["method"]})

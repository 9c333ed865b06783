"""All models of a finished run, attached to their bases one at a time."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.federation.participants import EVERYONE
from coterie.inference.finished import Loaded, Loader, recorded
from coterie.methods.contract import SERVER
from coterie.methods.pretrained import Pretrained, bare
from coterie.runs import RunFolder

BASE = "base"
"""The name of a run's base without an adapter, beside the names of methods."""
Step = Callable[[str, int, int], None]
"""Function that is called before each model is loaded.

Its arguments are the name of the model, the number of models loaded so far, and the number of all
models.
"""


class Attached(NamedTuple):
    """A model of a run. It is valid until the next model is attached to the same base."""

    method: str
    """The name of the method; BASE for the base without an adapter."""
    client: str
    base: Base
    model: PreTrainedModel
    digest: str
    """A hash of the base's name and of the adapter's tensors; equal models have equal hashes."""
    gate: Gate | None
    """The client's gate; None if the model answers all requests."""


class RunModels:
    """The models of a finished run: the base, the models of the baselines, and the run's own.

    The method `pretrained` is left out, because its model is the base.

    Args:
        path: The run folder.
        loader: The loader of the models. By default, it is a new loader.

    Raises:
        CoterieError: The run is not finished, or a plugin of the run is not loaded.
    """

    def __init__(self, path: Path, loader: Loader | None = None) -> None:
        folder, loader = RunFolder(path), loader or Loader()
        self.path, self.config = path, recorded(folder)
        if folder.result is None:
            raise CoterieError(
                f"The run in {path} is not finished; finish it with `coterie run --resume {path}`."
            )

        def bare_base(client: str) -> Loaded:
            base = loader.base(self.config, client)
            return Loaded(base, partial(bare, base))

        owners = _trained_by(folder, self.config)
        self.methods = {BASE: (self.config, dict.fromkeys(owners, bare_base))}
        """The configuration of each method's run, and functions that load its clients' models.

        The base comes first, and the run's own method last. The argument of a function is the name
        of the client.
        """
        baselines = {name: RunFolder(path / "baselines" / name) for name in self.config.baselines}
        for name, run in {**baselines, self.config.label: folder}.items():
            config = recorded(run)
            if not isinstance(config.method, Pretrained):
                load = partial(loader.load, run, config)
                self.methods[name] = (config, dict.fromkeys(_trained_by(run, config), load))

    def check(self, clients: Collection[str]) -> None:
        """Raise CoterieError if the run has no model of one of these clients."""
        owners = (loaders for _, loaders in self.methods.values())
        names = list(dict.fromkeys(chain.from_iterable(owners)))
        for client in clients:
            if client not in names:
                raise CoterieError(
                    f"The run {self.path} has no client {client!r} (clients: {', '.join(names)})."
                )

    def attached(
        self, clients: Collection[str] = (), step: Step = lambda *_: None
    ) -> Iterator[Attached]:
        """Yield the models one after another: first the bases, and last the run's own models.

        Args:
            clients: The names of the clients whose models are yielded; by default, all clients. The
                model of a pooled run is always yielded.
            step: Function that is called before each model is loaded.
        """
        chosen = [
            (method, client, load, config.base_of(client).model_dump_json())
            for method, (config, loaders) in self.methods.items()
            for client, load in loaders.items()
            if not clients or client in (*clients, EVERYONE)
        ]
        for done, (method, client, load, name) in enumerate(chosen):
            step(f"{method}: {client}", done, len(chosen))
            base, attach, gate = load(client)
            digest = adapter_digest(base, attach, name)
            yield Attached(method, client, base, attach(), digest, gate)


def _trained_by(run: RunFolder, config: RunConfig) -> list[str]:
    """Return the names of a run's clients, and "server" if the run scored a server's model."""
    has_server = "server" in (run.result or {}) and not config.pooled
    return [*run.description["clients"], *[SERVER] * has_server]


def adapter_digest(base: Base, attach: Callable[[], PreTrainedModel], name: str = "") -> str:
    """Return a hash of a base's name and of the tensors that an adapter adds to the base.

    Args:
        base: The base.
        attach: Function that attaches the adapter to the base and returns the model.
        name: The base's name and format.
    """
    frozen = {tensor.data_ptr() for _, tensor in _tensors(bare(base))}
    digest = blake2b(name.encode(), digest_size=16)
    for path, tensor in _tensors(attach()):
        if tensor.data_ptr() not in frozen:
            data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(f"{path} {tuple(tensor.shape)}".encode())
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.named_buffers())

"""The trained model that an export writes, and the facts that formats and model cards need."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from coterie.adapters import Adapter, Trainable, attached
from coterie.adapters.beside import Beside
from coterie.bases import Base, BaseSpec, Tokenizer, is_shipped, place, weights_digest
from coterie.bases.gguf import find_gguf
from coterie.bases.precision import Precision
from coterie.bases.sites import StandIn
from coterie.config.run import RunConfig
from coterie.errors import CoterieError
from coterie.evaluation.gate import Gate
from coterie.inference.bundle import BASE_ADAPTER, digest_of
from coterie.inference.finished import Loader, recorded, tokenizer
from coterie.methods.contract import Method
from coterie.runs import RunFolder


@dataclass(frozen=True)
class Source:
    """A client's trained model, on the CPU.

    Weights are in float32, whatever the format of the base, so that no update is lost by rounding;
    only a quantised base stays as it is.
    """

    folder: RunFolder
    config: RunConfig
    client: str
    base: Base
    spec: BaseSpec
    """The base in the run file."""
    digest: str | None
    """The hash of the base's weights; see `digest_of`."""
    dtype: torch.dtype
    """The number format of the base's weights in the run."""
    adapter: Trainable | None
    """The adapter; None if the model is the untrained base."""
    attach: Callable[[], PreTrainedModel]
    """Function that attaches the adapter to the base and returns the model."""
    tokenizer: Tokenizer
    gate: Gate | None = None
    """The client's gate; None if the model answers all requests."""

    @property
    def precision(self) -> Precision | None:
        """The precision with which the base is loaded again; see `load_base`."""
        return "fp32" if self.config.training.precision == "fp32" else None

    @property
    def place(self) -> str:
        """The folder of the base on this machine, or the base's name on the hub."""
        return place(self.spec.name, self.config.root)

    @property
    def public(self) -> BaseSpec:
        """The base without a path of this machine: a folder is named by its last component."""
        spec, path = self.spec, self.config.root / self.spec.name
        if spec.adapter is not None:
            spec = spec.model_copy(update={"adapter": BASE_ADAPTER})
        if is_shipped(spec.name) or not (path.is_dir() or find_gguf(path)):
            return spec
        return spec.model_copy(update={"name": path.stem if path.is_file() else path.name})

    @property
    def plain(self) -> bool:
        """Whether the adapter is plain LoRA: at most one low-rank pair for each linear layer."""
        return (
            isinstance(self.adapter, Adapter)
            and self.adapter.layout.experts <= 1
            and not any(isinstance(module, Beside) for module in self.attach().modules())
        )


def open_source(run: Path, client: str, method: Method | None) -> Source:
    """Load a client's model for an export.

    Args:
        run: The run folder.
        client: The client's name, or "server" for the server's own model.
        method: The run's method, if its class is not registered.

    Raises:
        CoterieError: The run is not finished, or it has no such client; the base cannot be loaded;
            or the model is not a base with an adapter of `coterie.adapters`.
    """
    folder = RunFolder(run)
    config = recorded(folder, method).model_copy(update={"device": "cpu"})
    if folder.result is None:
        raise CoterieError(
            f"The run in {run} is not finished; finish it with `coterie run --resume {run}`."
        )
    spec = config.base_of(client)
    weights = weights_digest(spec, config.root)
    if weights != folder.description.get("weights", {}).get(spec.name, weights):
        raise CoterieError(
            f"The base {spec.name!r} has changed since the run in {run} began; restore the base."
        )
    base, attach, gate = Loader().load(folder, config, client)
    dtype, digest = base.model.dtype, digest_of(base)
    if not spec.quantised:
        base.model.float()
    model = attach().eval()
    adapter = attached(base.model)
    is_bare = model is base.model and not any(isinstance(m, StandIn) for m in model.modules())
    if adapter is None and not is_bare:
        raise CoterieError(
            f"The model of the method {config.label!r} has no adapter of coterie.adapters, so it "
            "cannot be exported; copy the run folder instead."
        )
    words = tokenizer(run, client)
    return Source(folder, config, client, base, spec, digest, dtype, adapter, attach, words, gate)

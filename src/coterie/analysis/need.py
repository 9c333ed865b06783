"""What a base is, where adapters stand in it, and what a client with it will need.

Memory, and traffic per round, are told before anything of the base is loaded.

A training step and an evaluation are run on PyTorch's fake tensors, which have shapes and no
values: nothing is computed, and the bytes of all tensors that are alive are counted.
"""

import resource
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from coterie.adapters import Adapter, Layout, Trainable, trained
from coterie.adapters.coverage import coverage
from coterie.analysis.tables import Table
from coterie.bases import Base, BaseSpec, check_base, load_skeleton, load_tokenizer
from coterie.bases.checks import check_vocabulary, embedding_rows
from coterie.bases.precision import autocast, prepare
from coterie.bases.sites import QUERY_VALUE, layers
from coterie.bases.weights import DTYPES
from coterie.config.run import RunConfig
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.federation.participants import NOTHING, Participant, client_context
from coterie.losses.tokens import language_model_loss, token_losses
from coterie.methods.adapter import AdapterClient, AdapterMethod
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId
from coterie.training.optimiser import build
from coterie.training.passes import training_pass
from coterie.training.spec import TrainingSpec

LAYOUTS = {
    "experts and LoRA, as comigs-1g1s": Layout(),
    "LoRA on queries and values, as fedit": Layout(
        generalists=0, specialists=0, targets=QUERY_VALUE
    ),
}
QUANTISED = {"int8": 1.0, "nf4": 0.516}
"""Bytes per weight of a quantised linear layer; nf4 with its scales, quantised too (QLoRA)."""
CAST = (torch.float32, "bf16")
"""A checkpoint's format and a precision with which linear layers are cast after loading."""


@dataclass(frozen=True)
class Need:
    """What a process of one client needs beside Python and its libraries, in bytes."""

    weights: int
    """The base's."""
    pages: int
    """Of a checkpoint in another format: read once, and the system can take them back."""
    adapter: int
    """What is trained, with its gradients and the optimiser's state."""
    step: int
    """Activations, logits and the like at their highest in a training step."""
    scoring: int
    """The same in scoring a batch, which comes at another time."""
    traffic: int
    """Tensors of an upload."""

    @property
    def memory(self) -> int:
        """All together."""
        return self.weights + self.pages + self.adapter + max(self.step, self.scoring)


def need_of(config: RunConfig, client: ClientId) -> Need | None:
    """What a client of a run needs on a CPU; None where nobody can tell.

    That is so for methods whose clients do more than train an adapter, and where an operation's
    work depends on values. Raises CoterieError if there is no such base.
    """
    try:
        return _need_of(config, client)
    except CoterieError:
        raise
    except Exception:  # of all kinds, by operations on tensors that have no values
        return None


def _need_of(config: RunConfig, client: ClientId) -> Need | None:
    spec, training = config.base_of(client), config.training_of(client)
    tokenizer = load_tokenizer(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    kept = kept_dtype(skeleton)
    dtype = _dtype(spec, kept, training)
    cast = dtype != kept or spec.quantised or (kept, training.precision) == CAST
    pages = kept.itemsize * sum(p.numel() for p in skeleton.parameters()) if cast else 0
    skeleton.to(dtype)
    copies = 2 + _moments(training)  # with the gradient
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = skeleton.to_empty(device="cpu")
        model.tie_weights()  # which have come apart
        prepare(model, training.precision, config.data.window)
        weights = _weights(spec, model)
        base = Base(model, tokenizer, training.precision, torch.device("cpu"))
        side = side_without_texts(config, base, client)
        if not isinstance(side, AdapterClient):
            return None
        step, scoring = _training(config, side), _evaluation(config, side)
        parts = [(p.tensor.nbytes, p.role == "frozen") for p in side.parameters().values()]
        return Need(
            weights=weights,
            pages=pages,
            adapter=sum(size * (1 if frozen else copies) for size, frozen in parts),
            step=step,
            scoring=scoring,
            traffic=sum(tensor.nbytes for tensor in side.shared.values()),
        )


def process_memory() -> int:
    """Return the bytes that this process has held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def side_without_texts(
    config: RunConfig, base: Base, client: ClientId, tests: Sequence[str] = ()
) -> ClientSide:
    """Create a client's side that has no texts.

    Args:
        config: the run.
        base: the client's base, which may hold fake tensors.
        client: the client's name.
        tests: names of the test texts that it is scored on.
    """
    data = ClientData(NOTHING, NOTHING, NOTHING)
    participant = Participant(client, data, dict.fromkeys(tests, NOTHING))
    return config.method.client(client_context(config, base, participant, lambda *_: None))


def kept_dtype(skeleton: nn.Module) -> torch.dtype:
    """What a base's checkpoint keeps its weights in, as its configuration says."""
    config: Any = skeleton.config
    return config.get_text_config().dtype or config.dtype or torch.float32


def _dtype(spec: BaseSpec, kept: torch.dtype, training: TrainingSpec) -> torch.dtype:
    """What a base's weights are loaded in, or computed in where they are quantised."""
    if training.precision == "fp32":
        return torch.float32
    if spec.weights is not None:
        return DTYPES.get(spec.weights, torch.bfloat16)
    return torch.bfloat16 if kept == torch.float16 else kept


def _weights(spec: BaseSpec, model: nn.Module) -> int:
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    if spec.weights in QUANTISED:
        head = model.get_output_embeddings()  # pyright: ignore
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                weight = module.weight
                tensors[id(weight)] = int(weight.numel() * QUANTISED[spec.weights])
    return sum(tensors.values())


def _training(config: RunConfig, side: AdapterClient) -> int:
    """The most that a step holds beside weights and adapter."""
    training, adapter = side.context.training, side.adapter
    model = side.model()
    adapter.require_grad(trained)
    with Alive() as alive:
        ids = _ids(config, training.at_once)
        with training_pass(side.context, "need"), autocast(training.precision, "cpu"):
            loss = language_model_loss(model, ids)
        loss.backward()
    for parameter in adapter.tensors().values():
        parameter.grad = None
    return alive.peak


def _ids(config: RunConfig, count: int) -> Tensor:
    """Tokens that a pass reads for so many samples of a batch: a pair has two."""
    rows = count * config.data.declared.rows
    return torch.zeros(rows, config.data.window + 1, dtype=torch.long)


def _evaluation(config: RunConfig, side: AdapterClient) -> int:
    """The most that scoring a batch holds."""
    with Alive() as alive, autocast(side.context.training.precision, "cpu"):
        token_losses(side.model(), _ids(config, config.evaluation.batch))
    return alive.peak


def _moments(training: TrainingSpec) -> int:
    """How many tensors an optimiser keeps of each parameter's size."""
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimiser = build(training.optimiser, [parameter], training.learning_rate)
    optimiser.step()
    state = optimiser.state[parameter].values()
    return sum(isinstance(t, Tensor) and t.shape == parameter.shape for t in state)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside make, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count what it made."""
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            key = storage._cdata
            if key not in given and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key).atexit = False
        return made

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def base_table(spec: BaseSpec, config: RunConfig) -> Table:
    """Return a base's architecture and size, from its configuration, its tokenizer and the headers
    of its weights."""
    check_base(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    tokenizer = load_tokenizer(spec, config.root)
    check_vocabulary(spec.name, tokenizer, skeleton)
    text = skeleton.config.get_text_config()
    window = getattr(text, "max_position_embeddings", None)
    blocks = {type(layer).__name__: 0 for layer in layers(skeleton).values()}
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    kept = kept_dtype(skeleton)
    template = "its own" if tokenizer.chat_template else "none; Coterie's plain one is used"
    rows = [
        ("architecture", type(skeleton).__name__),
        ("parameters", f"{count / 1e6:,.1f} million"),
        ("weights", f"{str(kept).removeprefix('torch.')}, {_mib(count * kept.itemsize)} MiB"),
        ("layers", f"{len(layers(skeleton))} ({', '.join(blocks)})"),
        ("width", f"{text.hidden_size:,}"),
        ("context", "no limit" if window is None else f"{window:,} tokens"),
        ("vocabulary", f"{len(tokenizer):,} tokens; {embedding_rows(skeleton):,} embeddings"),
        ("chat template", template),
    ]
    return Table(str(spec), ("", "base"), rows)


def stands_table(spec: BaseSpec, config: RunConfig, client: ClientId | None) -> Table:
    """Where adapters would stand in a base: a client's of the run, else those of two methods."""
    skeleton: Any = load_skeleton(spec, config.root)
    method = config.method
    makers: dict[str, Callable[[], Trainable]] = {
        what: partial(Adapter, skeleton, layout, 0, "", lambda part: True)
        for what, layout in LAYOUTS.items()
    }
    if client is not None and isinstance(method, AdapterMethod):
        makers = {config.label: partial(method.adapter, skeleton, config.seed, client)}
    rows: list[tuple[str, str]] = []
    for what, make in makers.items():
        try:
            lines = coverage(skeleton, make().parameters().values()).lines()
        except CoterieError as error:
            lines = (str(error),)
        rows += [(what, line) for line in lines or ("nothing of the base",)]
    return Table("where adapters stand", ("adapter", "in the base"), rows)


def need_tables(config: RunConfig) -> Iterator[Table]:
    """For each base of a run, the memory of a client's process, and what a round sends."""
    programs = process_memory()
    names = [client.name for client in config.clients] or ["a client"]
    for spec, name in {config.base_of(name): name for name in reversed(names)}.items():
        title, need = f"{config.label} on {spec}", need_of(config, name)
        if need is None:
            note = "There is no estimate for this method, or for this base."
            yield Table(title, ("", "memory"), (), note)
            continue
        training = config.training_of(name)
        parts = {
            "Python and libraries, as here": programs,
            "base": need.weights,
            "checkpoint's pages, which the system can take back": need.pages,
            "adapter, gradients, optimiser": need.adapter,
            f"a training step ({training.at_once} samples at once)": need.step,
            f"or scoring ({config.evaluation.batch} windows at once)": need.scoring,
            "one client's process, at most": programs + need.memory,
        }
        note = (
            f"An estimate for a CPU, with windows of {config.data.window} tokens. In the local "
            "engine each further client adds its adapter and optimiser. An upload has "
            f"{need.traffic / 1e6:.2f} MB of tensors."
        )
        rows = [(what, _mib(count)) for what, count in parts.items() if count]
        yield Table(title, ("memory of a client", "MiB"), rows, note)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"

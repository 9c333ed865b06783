"""Tables about a base: its architecture, the layers that adapters cover, and a client's needs.

A client's needs are the memory of the client's process and the size of the client's uploads. Both
are estimated without the base's weights: a training step and an evaluation run on PyTorch's fake
tensors, which have shapes but no values, while the bytes of all live tensors are counted.
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
    "experts and LoRA, as in the method comigs-1g1s": Layout(),
    "LoRA on queries and values, as in the method fedit": Layout(
        generalists=0, specialists=0, targets=QUERY_VALUE
    ),
}
QUANTISED = {"int8": 1.0, "nf4": 0.516}
"""Bytes per weight of a quantised linear layer.

The value for nf4 includes the quantisation scales, which are also quantised (QLoRA).
"""
CAST = (torch.float32, "bf16")
"""The checkpoint dtype and training precision for which linear layers are cast on loading."""


@dataclass(frozen=True)
class Need:
    """Estimates of the memory and the traffic of one client's process, in bytes.

    The memory of Python and of imported libraries is not included.
    """

    weights: int
    """The weights of the base."""
    pages: int
    """The memory-mapped checkpoint if the weights are converted on loading; otherwise 0.

    The OS can reclaim this memory.
    """
    adapter: int
    """The adapter's parameters, and the gradients and optimiser state of trained parameters."""
    step: int
    """The peak memory of activations and logits in a training step."""
    scoring: int
    """The peak memory of activations and logits when a batch is scored.

    A client never trains and scores at the same time.
    """
    traffic: int
    """The size of the tensors in an upload."""

    @property
    def memory(self) -> int:
        """The peak memory.

        This is the sum of `weights`, `pages`, `adapter` and the larger of `step` (a training step)
        and `scoring`. A client never trains and scores at the same time.
        """
        return self.weights + self.pages + self.adapter + max(self.step, self.scoring)


def need_of(config: RunConfig, client: ClientId) -> Need | None:
    """Estimate one client's memory and traffic, assuming that the client trains on a CPU.

    For the estimate, the client's model runs on PyTorch's fake tensors, which have no values.

    Returns:
        The estimate, or None if the method's clients do more than train an adapter. The result is
        also None if the model cannot run on fake tensors, for example because a tensor's shape
        depends on the values of another tensor.

    Raises:
        CoterieError: if the base does not exist.
    """
    try:
        return _need_of(config, client)
    except CoterieError:
        raise
    except Exception:  # operations on fake tensors raise exceptions of many types
        return None


def _need_of(config: RunConfig, client: ClientId) -> Need | None:
    spec, training = config.base_of(client), config.training_of(client)
    tokenizer = load_tokenizer(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    stored = kept_dtype(skeleton)
    dtype = _dtype(spec, stored, training)
    cast = dtype != stored or spec.quantised or (stored, training.precision) == CAST
    pages = stored.itemsize * sum(p.numel() for p in skeleton.parameters()) if cast else 0
    skeleton.to(dtype)
    copies = 2 + _moments(training)  # the parameter, its gradient and the optimiser's moments
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = skeleton.to_empty(device="cpu")
        model.tie_weights()  # to_empty has untied the weights
        prepare(model, training.precision, config.data.window)
        weights = _weights(spec, model)
        base = Base(model, tokenizer, training.precision, torch.device("cpu"))
        side = side_without_texts(config, base, client)
        if not isinstance(side, AdapterClient):
            return None
        step, scoring = _training(config, side), _evaluation(config, side)
        sizes = [(p.tensor.nbytes, p.role == "frozen") for p in side.parameters().values()]
        return Need(
            weights=weights,
            pages=pages,
            adapter=sum(size * (1 if frozen else copies) for size, frozen in sizes),
            step=step,
            scoring=scoring,
            traffic=sum(tensor.nbytes for tensor in side.shared.values()),
        )


def process_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def side_without_texts(
    config: RunConfig, base: Base, client: ClientId, tests: Sequence[str] = ()
) -> ClientSide:
    """Create the method's client-side object without loading the client's texts.

    Args:
        config: the run.
        base: the client's base, whose weights may be fake tensors.
        client: the client's name.
        tests: the names of the test texts on which the client would be scored.
    """
    data = ClientData(NOTHING, NOTHING, NOTHING)
    participant = Participant(client, data, dict.fromkeys(tests, NOTHING))
    return config.method.client(client_context(config, base, participant, lambda *_: None))


def kept_dtype(skeleton: nn.Module) -> torch.dtype:
    """Return the dtype of a base's checkpoint.

    Args:
        skeleton: the base without loaded weights. Its configuration states the checkpoint's dtype.
            If the configuration states no dtype, the result is float32.
    """
    config: Any = skeleton.config
    return config.get_text_config().dtype or config.dtype or torch.float32


def _dtype(spec: BaseSpec, checkpoint_dtype: torch.dtype, training: TrainingSpec) -> torch.dtype:
    """Return the dtype of a base's weights after loading.

    For quantised weights, this is the dtype in which the base computes.
    """
    if training.precision == "fp32":
        return torch.float32
    if spec.weights is not None:
        return DTYPES.get(spec.weights, torch.bfloat16)
    return torch.bfloat16 if checkpoint_dtype == torch.float16 else checkpoint_dtype


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
    """Measure the peak memory of a training step, excluding the weights and the adapter."""
    training, adapter = side.context.training, side.adapter
    model = side.model()
    adapter.require_grad(trained)
    with LiveTensors() as tensors:
        ids = _ids(config, training.at_once)
        with training_pass(side.context, "need"), autocast(training.precision, "cpu"):
            loss = language_model_loss(model, ids)
        loss.backward()
    for parameter in adapter.tensors().values():
        parameter.grad = None
    return tensors.peak


def _ids(config: RunConfig, count: int) -> Tensor:
    """Return a batch of token ids, shaped (rows, window + 1), in which all ids are 0.

    Args:
        config: the run.
        count: the number of samples. A preference pair has two rows; any other sample has one row.
    """
    rows = count * config.data.declared.rows
    return torch.zeros(rows, config.data.window + 1, dtype=torch.long)


def _evaluation(config: RunConfig, side: AdapterClient) -> int:
    """Measure the peak memory of scoring a batch, excluding the weights and the adapter."""
    with LiveTensors() as tensors, autocast(side.context.training.precision, "cpu"):
        token_losses(side.model(), _ids(config, config.evaluation.batch))
    return tensors.peak


def _moments(training: TrainingSpec) -> int:
    """Count the state tensors that the optimiser stores per parameter.

    Only tensors with the parameter's shape are counted. For Adam, the count is two.
    """
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimiser = build(training.optimiser, [parameter], training.learning_rate)
    optimiser.step()
    state = optimiser.state[parameter].values()
    return sum(isinstance(t, Tensor) and t.shape == parameter.shape for t in state)


class LiveTensors(TorchDispatchMode):
    """A dispatch mode that counts the bytes of tensors that are created while the mode is active.

    `now` is the number of bytes of the created tensors that are still live. `peak` is the largest
    value of `now` so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the bytes of the storages that the operation allocates."""
        outputs = func(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(outputs):
            key = storage._cdata
            if key not in inputs and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._release, key).atexit = False
        return outputs

    def _release(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def base_table(spec: BaseSpec, config: RunConfig) -> Table:
    """Return a table of a base's architecture and size, without loading the base's weights."""
    check_base(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    tokenizer = load_tokenizer(spec, config.root)
    check_vocabulary(spec.name, tokenizer, skeleton)
    text_config = skeleton.config.get_text_config()
    window = getattr(text_config, "max_position_embeddings", None)
    blocks = {type(layer).__name__: 0 for layer in layers(skeleton).values()}
    count = sum(parameter.numel() for parameter in skeleton.parameters())
    dtype = kept_dtype(skeleton)
    template = "the base's own" if tokenizer.chat_template else "none (Coterie's plain template)"
    rows = [
        ("architecture", type(skeleton).__name__),
        ("parameters", f"{count / 1e6:,.1f} million"),
        ("weights", f"{str(dtype).removeprefix('torch.')}, {_mib(count * dtype.itemsize)} MiB"),
        ("layers", f"{len(layers(skeleton))} ({', '.join(blocks)})"),
        ("width", f"{text_config.hidden_size:,}"),
        ("context", "no limit" if window is None else f"{window:,} tokens"),
        ("vocabulary", f"{len(tokenizer):,} tokens; {embedding_rows(skeleton):,} embeddings"),
        ("chat template", template),
    ]
    return Table(str(spec), ("", "base"), rows)


def coverage_table(spec: BaseSpec, config: RunConfig, client: ClientId | None) -> Table:
    """Return a table that shows which layers of a base have adapters.

    Args:
        spec: the base.
        config: the run.
        client: the client for whose adapter the layers are shown. If `client` is None, or if the
            method trains no adapters, the layers are shown for the adapters of two common methods.
    """
    skeleton: Any = load_skeleton(spec, config.root)
    method = config.method
    makers: dict[str, Callable[[], Trainable]] = {
        name: partial(Adapter, skeleton, layout, 0, "", lambda parameter: True)
        for name, layout in LAYOUTS.items()
    }
    if client is not None and isinstance(method, AdapterMethod):
        makers = {config.label: partial(method.adapter, skeleton, config.seed, client)}
    rows: list[tuple[str, str]] = []
    for name, make in makers.items():
        try:
            lines = coverage(skeleton, make().parameters().values()).lines()
        except CoterieError as error:
            lines = (str(error),)
        rows += [(name, line) for line in lines or ("none",)]
    return Table("layers that adapters cover", ("adapter", "location in the base"), rows)


def need_tables(config: RunConfig) -> Iterator[Table]:
    """Yield a table for each base of a run, with the memory needed by a client with this base."""
    libraries = process_memory()
    names = [client.name for client in config.clients] or ["a client"]
    for spec, name in {config.base_of(name): name for name in reversed(names)}.items():
        title, need = f"{config.label} on {spec}", need_of(config, name)
        if need is None:
            note = "There is no estimate for this method with this base."
            yield Table(title, ("", "memory"), (), note)
            continue
        training = config.training_of(name)
        sizes = {
            "Python and libraries (measured in this process)": libraries,
            "base": need.weights,
            "checkpoint, memory-mapped (the OS can reclaim it)": need.pages,
            "adapter, gradients, optimiser state": need.adapter,
            f"training step ({training.at_once} samples at once)": need.step,
            f"scoring ({config.evaluation.batch} windows at once)": need.scoring,
            "peak memory of one client's process": libraries + need.memory,
        }
        note = (
            f"Estimated for a CPU and windows of {config.data.window} tokens. The peak includes "
            "either the training step or scoring, whichever needs more memory. In the local "
            "engine, each additional client adds the memory of one adapter, its gradients and its "
            f"optimiser state. An upload contains {need.traffic / 1e6:.2f} MB of tensors."
        )
        rows = [(item, _mib(size)) for item, size in sizes.items() if size]
        yield Table(title, ("memory of a client", "MiB"), rows, note)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"

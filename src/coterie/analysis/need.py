"""The memory, traffic and disk that a run needs, computed before any weights are loaded.

Everything is computed from the shapes of tensors: the base is on the meta device, and only adapters
contain values. `coterie.analysis.activations` computes the memory of a training step by a formula,
and `coterie.analysis.sizes` computes the sizes of messages by a dry run.
"""

import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.adapters import detach, trained
from coterie.analysis.activations import Pass, is_known, scoring_bytes, training_bytes
from coterie.analysis.sizes import (
    SENT,
    Sizes,
    bytes_in,
    client_names,
    instances_in,
    sizes_of,
    with_residuals,
)
from coterie.bases import Base, BaseSpec, load_skeleton, load_tokenizer
from coterie.bases.precision import SHORT_WINDOW, prepare
from coterie.bases.weights import DTYPES
from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import ClientData
from coterie.federation.participants import NOTHING, Participant, client_context
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId
from coterie.training.local import LocalTraining, without_training
from coterie.training.optimiser import build
from coterie.training.spec import TrainingSpec

QUANTISED = {"int8": 1.0, "nf4": 0.516}
"""Bytes per weight of a quantised linear layer.

The value for nf4 includes the quantisation scales, which are also quantised (QLoRA).
"""
CAST = (torch.float32, "bf16")
"""The checkpoint dtype and training precision for which linear layers are cast on loading."""
HEAP = {"cpu": 0.28}
"""Memory that an allocator keeps between live tensors, relative to the size of the tensors.

For a CPU, this is the mean of measurements with glibc's heap, which were between 0.22 and 0.34
(docs/use/bases.md). Other devices have not been measured.
"""
WINDOWS = 20
"""The number of windows in the text of a client whose needs are computed."""


@dataclass(frozen=True)
class Need:
    """The needs of one client and of the server of a run, in bytes.

    The memory of Python and of imported libraries is not included.
    """

    weights: int
    """The weights of the client's base."""
    pages: int
    """The memory-mapped checkpoint if the weights are converted on loading; otherwise 0.

    The OS can reclaim this memory.
    """
    adapter: int
    """The adapter's parameters, and the gradients and optimiser state of trained parameters."""
    copies: int
    """Other tensors that the client holds: further adapters, copies and the best model so far."""
    step: int
    """The peak memory of activations and logits in a training step."""
    scoring: int
    """The peak memory of activations and logits when a batch is scored."""
    receiving: int
    """The peak memory of applying a download, and of evaluating other clients' uploads in it.

    If the client uses a GPU, the download itself is not counted, because it is in main memory.
    """
    heap: float
    """Memory that the device's allocator keeps, relative to `step`, `scoring` and `receiving`."""
    state: int
    """The client's state and its best model in a checkpoint."""
    clients: int
    """The number of clients."""
    exchange: Sizes | None
    """The sizes of messages and of the server; None if they are unknown."""

    @property
    def memory(self) -> int:
        """The peak memory of the client.

        The client trains, scores and applies downloads one after the other.
        """
        return self.weights + self.pages + self.adapter + self.copies + self.work

    @property
    def work(self) -> int:
        """The largest of `step`, `scoring` and `receiving`, with the memory of the allocator."""
        return int((1 + self.heap) * max(self.step, self.scoring, self.receiving))

    @property
    def disk(self) -> int:
        """The size of a run folder: two checkpoints of all clients and of the server."""
        server = 0 if self.exchange is None else self.exchange.state
        return int(2 * (server + self.clients * self.state))


def need_of(config: RunConfig, client: ClientId, device: str = "cpu") -> Need | None:
    """Compute what one client and the server of a run need.

    Args:
        config: The run.
        client: The client's name.
        device: The type of the client's device, such as `cuda`.

    Returns:
        The needs, or None if they are unknown: the clients train a soft prompt, learn from
        predictions or compute with the base's weights, or the base has blocks of unknown memory.

    Raises:
        CoterieError: If the base does not exist.
    """
    shapes = shapes_of(config, client)
    return None if shapes is None else shapes.need(config, device)


@dataclass(frozen=True)
class Shapes:
    """The objects of a run without the base's weights, whose shapes determine all needs."""

    client: ClientId
    side: ClientSide
    """The method's client-side object, whose base is on the meta device."""
    skeleton: PreTrainedModel
    kept: torch.dtype
    """The dtype of the base's checkpoint."""
    held: tuple[int, int, int]
    """The sizes of what the client holds besides the base, as `_held` returns them."""
    exchange: Sizes | None

    def need(self, config: RunConfig, device: str) -> Need:
        """Compute what the client and the server need.

        Args:
            config: The run. It may differ from the run for which the objects were created only in
                the base's quantisation, the sizes of batches, and checkpointing.
            device: The type of the client's device.
        """
        spec, training = config.base_of(self.client), config.training_of(self.client)
        adapter, copies, state = self.held
        received, dtype = self.exchange or Sizes(), self.skeleton.dtype
        cast = dtype != self.kept or spec.quantised or (self.kept, training.precision) == CAST
        numbers = sum(p.numel() for p in self.skeleton.parameters() if p.is_meta)
        model = self.side.model()
        if self._trains_weights:  # parametrizations hide the structure of the layers
            detach(model)
        scoring, judging = (
            scoring_bytes(model, self._size(config, count, device))
            for count in (config.evaluation.batch, training.at_once)
        )
        # Messages are in main memory, even if the client's model is on a GPU.
        message = SENT * received.down + (SENT + 1) * received.peers if device == "cpu" else 0
        return Need(
            weights=_weights(spec, model),
            pages=self.kept.itemsize * numbers if cast and device == "cpu" else 0,
            adapter=adapter,
            copies=copies,
            step=training_bytes(
                model,
                self._size(config, training.at_once, device),
                checkpoints=training.checkpointing,
                stores=training.store_activations,
            ),
            scoring=scoring,
            receiving=int(message + (judging if received.peers else 0)),
            heap=HEAP.get(device, 0.0),
            state=state,
            clients=len(client_names(config)),
            exchange=self.exchange,
        )

    def _size(self, config: RunConfig, count: int, device: str) -> Pass:
        """Return the sizes of a pass; a preference pair has two rows, any other sample has one."""
        window, half = config.data.window, config.precision == "bf16"
        quantised = config.base_of(self.client).weights
        return Pass(
            rows=count * config.data.declared.rows,
            window=window,
            residual=self.skeleton.dtype.itemsize,
            working=2 if half else 4,
            eager=self.skeleton.config._attn_implementation == "eager"
            or (device == "cpu" and half and window <= SHORT_WINDOW),
            device=device,
            quantised=quantised if quantised in QUANTISED else None,
            full=self._trains_weights,
        )

    @property
    def _trains_weights(self) -> bool:
        return any(p.kind.replaces_weights for p in self.side.parameters().values())


def shapes_of(config: RunConfig, client: ClientId) -> Shapes | None:
    """Create the objects of a run without the base's weights, and execute a dry run of exchanges.

    Args:
        config: The run.
        client: The client's name.

    Returns:
        The objects, or None if the needs are unknown; see `need_of`.

    Raises:
        CoterieError: If the base does not exist.
    """
    spec, training, method = config.base_of(client), config.training_of(client), config.method
    tokenizer = load_tokenizer(spec, config.root)
    skeleton: Any = load_skeleton(spec, config.root)
    if not is_known(skeleton):
        return None
    kept = kept_dtype(skeleton)
    prepare(skeleton.to(_dtype(spec, kept, training)), config.precision, config.data.window)
    base = Base(skeleton, tokenizer, config.precision, torch.device("meta"))
    make = cache(partial(_side, config, base))
    try:
        side = make(client)
    except NotImplementedError:  # the method computes with the base's weights
        return None
    parameters = side.parameters().values()
    if not parameters or any(p.kind.extends_input for p in parameters):
        return None
    if any(not isinstance(field.dtype, str) and not field.peers for field in method.schema().down):
        return None  # clients learn from predictions (FedMKT)

    def side_of(name: ClientId) -> ClientSide:
        alike = isinstance(method, AdapterMethod) and method.layout(name) == method.layout(client)
        return side if alike else make(name)

    held = _held(config, side)
    exchange = with_residuals(config, side, sizes_of(config, skeleton, side_of))
    return Shapes(client, side, skeleton, kept, held, exchange)


def _held(config: RunConfig, side: ClientSide) -> tuple[int, int, int]:
    """Return the sizes of what a client holds besides the base.

    Returns:
        Three numbers of bytes: the adapter with gradients and moments; all other tensors; and the
        client's state and best model in a checkpoint.
    """
    parameters = list(side.parameters().values())
    trainings = [*instances_in(side, LocalTraining)]
    updated, gradients, starts = [], [], 0
    for training in trainings:
        adapter = training.adapter.parameters().values()
        for level in training.levels:
            updated.append(_bytes(p.tensor for p in adapter if level.selects(p)))
            gradients.append(updated[-1] + _bytes(p.tensor for p in adapter if level.leaves(p)))
        if any(level.penalty for level in training.levels):
            starts = max(starts, _bytes(p.tensor for p in adapter))
    if not trainings:  # the client creates its optimisers in every round
        updated = gradients = [_bytes(p.tensor for p in parameters if trained(p))]
    moments = _moments(config.training) * sum(updated)
    own = _bytes(p.tensor for p in parameters)
    others = bytes_in(side) - _bytes(p.tensor for p in parameters if not p.tensor.is_meta)
    initial = side.state()
    best = without_training(initial).nbytes if config.evaluation.keep == "best" else 0
    state = moments + initial.nbytes
    copies = others + starts + best + side.copies * state
    return own + max(gradients, default=0) + moments, copies, state + best


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def process_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def side_without_texts(
    config: RunConfig,
    base: Base,
    client: ClientId,
    tests: Sequence[str] = (),
    text: Tokens = NOTHING,
) -> ClientSide:
    """Create the method's client-side object without loading the client's texts.

    Args:
        config: The run.
        base: The client's base, possibly on the meta device.
        client: The client's name.
        tests: The names of the test texts on which the client would be scored.
        text: The text that replaces each of the client's texts.
    """
    data = ClientData(text, text, text)
    participant = Participant(client, data, dict.fromkeys(tests, text))
    return config.method.client(client_context(config, base, participant, lambda *_: None))


def _side(config: RunConfig, base: Base, client: ClientId) -> ClientSide:
    tokens = torch.zeros(WINDOWS * (config.data.window + 1), dtype=torch.int32)
    return side_without_texts(config, base, client, text=Tokens(tokens, len(tokens)))


def kept_dtype(skeleton: nn.Module) -> torch.dtype:
    """Return the dtype of a base's checkpoint.

    Args:
        skeleton: The base without loaded weights. Its configuration states the checkpoint's dtype.
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


def _weights(spec: BaseSpec, model: PreTrainedModel) -> int:
    """Return the size of a base's weights and buffers, which are on the meta device.

    Tied weights count once.
    """
    tensors = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.is_meta}
    if spec.weights in QUANTISED:
        head = model.get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D) and module is not head:
                weight = module.weight
                tensors[id(weight)] = int(weight.numel() * QUANTISED[spec.weights])
    return sum(tensors.values())


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

"""The memory, traffic and disk that a run needs, computed before any weights are loaded.

Everything is computed from the shapes of tensors: the base is on the meta device, and only adapters
contain values (`coterie.analysis.shapes`). `coterie.analysis.held` computes the memory that a
client holds between training steps, `coterie.analysis.activations` computes the memory of a step by
a formula, and `coterie.analysis.sizes` computes the sizes of messages by a dry run.
"""

from dataclasses import dataclass

import torch

from coterie.adapters import detach
from coterie.analysis.activations import Pass, scoring_bytes, training_bytes
from coterie.analysis.held import QUANTISED, weights_bytes
from coterie.analysis.shapes import Shapes, shapes_of
from coterie.analysis.sizes import SENT, Sizes, client_names
from coterie.bases.precision import SHORT_WINDOW
from coterie.config.run import RunConfig
from coterie.training.context import ClientId

CAST = (torch.float32, "bf16")
"""The checkpoint dtype and training precision for which linear layers are cast on loading."""
HEAP = {"cpu": 0.28}
"""Memory that an allocator keeps between live tensors, relative to the size of the tensors.

For a CPU, this is the mean of measurements with glibc's heap, which were between 0.22 and 0.34
(docs/use/bases.md). Other devices have not been measured.
"""


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
    return None if shapes is None else need_from(shapes, config, device)


def need_from(shapes: Shapes, config: RunConfig, device: str) -> Need:
    """Compute what the client and the server need.

    Args:
        shapes: The objects of the run without the base's weights.
        config: The run. It may differ from the run for which the objects were created only in the
            base's quantisation, the sizes of batches, and checkpointing.
        device: The type of the client's device.
    """
    spec, training = config.base_of(shapes.client), config.training_of(shapes.client)
    held, received = shapes.held, shapes.exchange or Sizes()
    cast = (
        shapes.skeleton.dtype != shapes.kept
        or spec.quantised
        or (shapes.kept, training.precision) == CAST
    )
    numbers = sum(p.numel() for p in shapes.skeleton.parameters() if p.is_meta)
    model = shapes.side.model()
    if shapes.trains_weights:  # parametrizations hide the structure of the layers
        detach(model)
    scoring, judging = (
        scoring_bytes(model, _size(shapes, config, count, device))
        for count in (config.evaluation.batch, training.at_once)
    )
    # Messages are in main memory, even if the client's model is on a GPU.
    message = SENT * received.down + (SENT + 1) * received.peers if device == "cpu" else 0
    return Need(
        weights=weights_bytes(spec, model),
        pages=shapes.kept.itemsize * numbers if cast and device == "cpu" else 0,
        adapter=held.adapter,
        copies=held.copies,
        step=training_bytes(
            model,
            _size(shapes, config, training.at_once, device),
            checkpoints=training.checkpointing,
            stores=training.store_activations,
        ),
        scoring=scoring,
        receiving=int(message + (judging if received.peers else 0)),
        heap=HEAP.get(device, 0.0),
        state=held.state,
        clients=len(client_names(config)),
        exchange=shapes.exchange,
    )


def _size(shapes: Shapes, config: RunConfig, count: int, device: str) -> Pass:
    """Return the sizes of a pass; a preference pair has two rows, any other sample has one."""
    window, half = config.data.window, config.precision == "bf16"
    quantised = config.base_of(shapes.client).weights
    return Pass(
        rows=count * config.data.declared.rows,
        window=window,
        residual=shapes.skeleton.dtype.itemsize,
        working=2 if half else 4,
        eager=shapes.skeleton.config._attn_implementation == "eager"
        or (device == "cpu" and half and window <= SHORT_WINDOW),
        device=device,
        quantised=quantised if quantised in QUANTISED else None,
        full=shapes.trains_weights,
    )

"""The sizes of a run's messages and of its server, from a dry run without training.

A few exchanges are executed with two and with three clients: the server sends downloads, and each
client uploads its untrained parameters. The adapters have values; the base is on the meta device.

The sizes of the server's tensors, of its work and of its state are extrapolated linearly to the
number of clients. Uploads and downloads are those of the larger run. The size of the other clients'
uploads in a download is multiplied by the number of other clients, which a method may limit
(setting `peers`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import TypeVar

from coterie.bases import BaseSpec
from coterie.config.run import RunConfig
from coterie.data.division.divide import names_of_clients
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.lazy import PerClient
from coterie.federation.participants import server_context
from coterie.federation.sizes import message_sizes
from coterie.messages import Message, MessageError, Schema, State, Tensors
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import ClientId, ClientSide, Server
from coterie.methods.tensors import copied
from coterie.transforms.context import Rows
from coterie.turn import TRAIN, Turn

SideOf = Callable[[ClientId], ClientSide]
"""Function that returns the method's client-side object for a client."""
EXCHANGES = 3
"""The number of exchanges of the dry run after a method's `warmup`."""
SUMS = 3
"""The memory of an aggregate while it is computed, relative to its size: sums are in float64."""
SENT = 2
"""The memory of a message that is received or read, relative to the size of its tensors.

The tensors and the encoded payload are in memory at the same time.
"""

ENCODED = 3
"""The memory of a message or a state that is encoded: safetensors has two copies at the end."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the largest messages of one client, and of the server, in bytes."""

    up: float = 0
    """An upload."""
    down: float = 0
    """A download, without other clients' uploads."""
    peers: float = 0
    """Other clients' uploads in a download."""
    held: float = 0
    """The server's tensors in memory between its tasks."""
    work: float = 0
    """The memory in which the server aggregates, and writes and reads a state."""
    state: float = 0
    """The server's state in a checkpoint."""

    @property
    def server(self) -> float:
        """The peak memory of the server, without Python and its libraries."""
        return self.held + max(self.work, ENCODED * (self.down + self.peers))


def client_names(config: RunConfig) -> list[ClientId]:
    """Return the names of a run's clients, without reading texts.

    The names come from the run file or its section `divide`. If `divide` derives them from labels
    in the data, or if the run has no clients, the result is `["a client"]`.
    """
    names = [client.name for client in config.clients]
    if config.divide is not None:
        names = names_of_clients(config.divide, ())
    return names or ["a client"]


def clients_by_base(config: RunConfig) -> dict[BaseSpec, ClientId]:
    """Return the first client of each base of a run, without reading texts."""
    return {config.base_of(name): name for name in reversed(client_names(config))}


def sizes_of(config: RunConfig, skeleton: PreTrainedModel, side_of: SideOf) -> Sizes | None:
    """Return the sizes of a run's messages and server, or None if they are unknown.

    Sizes are unknown if a method's uploads contain results of training, such as predictions.

    Args:
        config: The run.
        skeleton: The run's base on the meta device.
        side_of: Function that returns the method's client-side object for a client.
    """
    names = client_names(config)
    count = len(names)
    few = min(count, 3)
    try:
        first, *more = (
            _rehearse(config, skeleton, names[:clients], side_of)
            for clients in range(min(2, few), few + 1)
        )
    except Exception:  # methods that need results of training raise exceptions of many types
        return None
    if not more:
        return first
    [second] = more
    grown = {
        key: getattr(first, key) + (count - 2) * (getattr(second, key) - getattr(first, key))
        for key in ("held", "work", "state")
    }
    others = min(count - 1, getattr(config.method, "peers", count - 1))
    return replace(second, peers=first.peers * others, **grown)


def with_residuals(config: RunConfig, side: ClientSide, sizes: Sizes | None) -> Sizes | None:
    """Add the residuals of exact averages after the last exchange, when their rank is largest."""
    method = config.method
    if sizes is None or not isinstance(method, AdapterMethod) or not method.averages_exactly:
        return sizes
    residual = 4 * message_sizes(config, side.parameters(), len(client_names(config))).grown()
    held, work = sizes.held + residual, sizes.work + ENCODED * residual
    state, down = sizes.state + residual, sizes.down + residual
    return replace(sizes, down=down, held=held, work=work, state=state)


def _rehearse(
    config: RunConfig, skeleton: PreTrainedModel, names: Sequence[ClientId], side_of: SideOf
) -> Sizes:
    """Execute exchanges without training, and return the largest sizes."""
    method = config.method
    server = method.server(server_context(config, skeleton, names, None, lambda *_: None))
    exchange, value, sizes = Rehearsal(method.schema()), server.initial(), Sizes()
    for name in names:
        hello = side_of(name).hello()
        server.prepare(name, hello)
        value = server.join(value, name, hello)
    exchanges = min(EXCHANGES + getattr(method, "warmup", 0), config.exchanges)
    phases = config.phases
    turns = [config.turn(n * len(phases) + phases.index(TRAIN)) for n in range(exchanges + 1)]
    for turn in turns[:-1]:
        exchange.open(turn, names)
        for name in names:
            sizes = _with_download(sizes, server.download(value, name, exchange), side_of(name))
        for name in names:
            upload = side_of(name).upload(turn)
            sizes = replace(sizes, up=max(sizes.up, _size(upload)))
            exchange.take(server, value, name, upload)
        value = server.aggregate(value, exchange)
        sizes = _with_server(sizes, server, value.state(), exchange.size)
    exchange.open(turns[-1], ())
    for name in names:
        sizes = _with_download(sizes, server.download(value, name, exchange), side_of(name))
    return sizes


class Rehearsal(Exchange):
    """An exchange whose uploads are in memory, and whose means are copies of an upload.

    There is a separate mean for each row, as if the weights of all clients differed.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema

    def open(self, turn: Turn, clients: Iterable[ClientId]) -> None:
        self.turn, self.clients = turn, tuple(clients)
        self.asked = {*self.clients}
        self.size = 0
        """The size of the means that are in memory at once, in bytes."""
        self._received: dict[ClientId, Message] = {}
        self._first: dict[str, Tensors] = {}

    def take(self, server: Server[Any], value: Any, name: ClientId, upload: Message) -> None:
        """Store an upload, unless it lacks results of training and `check` refuses it."""
        zeros = {
            group: {n: torch.zeros(shape) for n, shape in shapes.items()}
            for group, shapes in server.expects(value, name, self).items()
        }
        self._first = self._first or {
            group: {**zeros.get(group, {}), **upload[group]} for group in self.schema.averaged
        }
        with suppress(MessageError):
            server.check(value, name, upload, self)
            self._received[name] = upload

    @property
    def counted(self) -> list[ClientId]:
        return [*self._received]

    def mean(self, group: str, start: Tensors | None = None) -> Tensors:
        mean = copied(self._first[group])
        self.size += sum(tensor.nbytes for tensor in mean.values())
        return mean

    def holders(self, group: str) -> Mapping[str, int]:
        return dict.fromkeys(self._first[group], len(self.clients))

    def means(self, group: str, rows: Rows) -> PerClient[Tensors]:
        size, self.size = self.size, 0
        means = PerClient({name: self.mean(group) for name in rows})
        self.size = max(size, self.size // max(1, len(rows)))  # one at a time
        return means

    def each(self, name: str | None = None) -> PerClient[Any]:
        uploads, groups = self._received.items(), self.schema.reduced("each")
        if name is None:
            return PerClient({c: u.only(groups).groups for c, u in uploads})
        sent = ((c, u.groups.get(name, u.values.get(name))) for c, u in uploads)
        return PerClient({client: field for client, field in sent if field is not None})

    def weight(self, client: str) -> float:
        return 1.0


def _with_download(sizes: Sizes, message: Message, side: ClientSide) -> Sizes:
    """Return the sizes, updated with the size of a download.

    The client applies the download only if it contains parameters that the client lacks.
    """
    own, peers = replace(message, peers={}), Message(peers=message.peers)
    if message["adapter"].keys() - side.parameters().keys():
        side.receive(message)
    return replace(sizes, down=max(sizes.down, _size(own)), peers=max(sizes.peers, _size(peers)))


def _with_server(sizes: Sizes, server: object, state: State, means: int) -> Sizes:
    """Return the sizes, updated at the end of an exchange.

    Args:
        sizes: The sizes before.
        server: The server.
        state: The state of the server's value. Its nested states are in files.
        means: The size of the means that are in memory at once, in bytes.
    """
    held, *in_files = (replace(part, parts={}).nbytes for _, part in state.walk())
    uploads = (SENT + 1) * sizes.up  # one is read while the previous one is in memory
    saving = max([(ENCODED - 1) * held, *(ENCODED * size for size in in_files)])
    return replace(
        sizes,
        held=max(sizes.held, bytes_in(server) + held),
        work=max(sizes.work, SUMS * means + uploads, saving),
        state=max(sizes.state, held + sum(in_files)),
    )


def _size(message: Message) -> int:
    return sum(tensor.nbytes for *_, tensor in message.tensors())


def bytes_in(value: object) -> int:
    """Return the size of all tensors that an object holds, except those on the meta device.

    Memory that several tensors share counts once.
    """
    tensors = (tensor for tensor in instances_in(value, Tensor) if not tensor.is_meta)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


T = TypeVar("T")


def instances_in(value: object, kind: type[T]) -> Iterator[T]:
    """Yield the instances of a class that an object holds in memory, in attributes and items."""
    seen: dict[int, object] = {}
    left = [value]
    while left:
        item: Any = left.pop()
        if id(item) in seen or isinstance(item, str | int | float | type | None):
            continue
        seen[id(item)] = item
        if isinstance(item, kind):
            yield item
        if isinstance(item, Tensor | PerClient):  # clients' tensors are in files
            continue
        left += vars(item).values() if hasattr(item, "__dict__") else ()
        if isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple | set):
            left += item

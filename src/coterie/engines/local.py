"""The local engine: all clients work in this process, one at a time.

Clients share one copy of each base. All clients' states are on disk, so the memory that a run needs
hardly grows with the number of clients.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from coterie.engines.client_host import ClientHost
from coterie.engines.clients import Clients, Download, decoded, encoded
from coterie.engines.rounds import Rounds
from coterie.errors import Diverged
from coterie.evaluation.evaluate import Score
from coterie.federation.sizes import check_messages, message_sizes
from coterie.memory import free_memory
from coterie.messages import State
from coterie.messages.names import BYTES_DOWN
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId
from coterie.turn import Turn

SHARE = 8
"""The divisor of the memory that is free at the start: clients in memory use at most an eighth."""
TRAINED = 4
"""The memory of a client in training, relative to the client's initial state.

The optimiser needs a gradient and two moments for each parameter.
"""


class LocalClients(Clients, Mapping[ClientId, ClientSide]):
    """A mapping from the names of clients in this process to the method's client-side objects.

    A client is loaded into memory when it is needed. After each of its turns, its state is written
    to disk. The number of clients in memory is limited, in proportion to the memory that is free
    before the first client is created. If this limit is reached, the client that was loaded last is
    removed from memory before another client is loaded. All rounds use the clients in the same
    order. The clients that were loaded first therefore stay in memory for all rounds. If the least
    recently used client were removed instead, every client would be read from disk in every round.
    """

    in_process = True

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        self.scores: dict[ClientId, dict[str, dict[str, Score]]] = {
            name: {} for name in self.participants
        }
        self.hosts: dict[ClientId, ClientHost] = {}
        self._memory, self._most = _free(self.base.device), len(self.participants)
        self._unsaved: set[ClientId] = set()
        """The clients in memory whose newest states may not be on disk."""
        self._covered: set[tuple[str, ...]] = set()

    def __getitem__(self, name: ClientId) -> ClientSide:
        """Return the method's client-side object for a client, in the client's newest state."""
        return self.host(name).side

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.participants)

    def __len__(self) -> int:
        """Return the number of clients, including those that are not in memory."""
        return len(self.participants)

    def host(self, name: ClientId) -> ClientHost:
        """Return the `ClientHost` of a client, in the client's newest state; it may be changed."""
        if name not in self.hosts:
            while len(self.hosts) >= self._most:
                last = next(reversed(self.hosts))
                self._save(last)
                del self.hosts[last]
            state, kept = self.new.newest(name)
            self.hosts[name], _ = self._begin(name, decoded(state), decoded(kept))
        self._unsaved.add(name)
        return self.hosts[name]

    def _save(self, name: ClientId) -> None:
        """Write the newest states of a client in memory to disk, unless they are there already."""
        if name in self._unsaved:
            self.new.put(encoded(self.hosts[name].states()))
            self._unsaved.remove(name)

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        for name in self.participants:
            yield name, self._hello(name)

    def _hello(self, name: ClientId) -> bytes:
        host, hello = self._begin(name, None, None)
        parameters = host.side.parameters()
        check_messages(message_sizes(self.config, parameters, len(self.participants)))
        self._covered.add(host.covered)
        size = max(1, SHARE * TRAINED * host.side.state().nbytes)
        self._most = max(1, min(self._most, self._memory // size))
        if len(self.hosts) < self._most:
            self.hosts[name] = host
        return hello

    def step(
        self, turn: Turn, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        for name in names:
            received, before = download(name), self.recorder.count
            try:
                upload = self.host(name).step(turn, received, counted=name not in lost)
                self._save(name)
            except Diverged as error:
                self.recorder.undo(before)
                self.undo(name)
                self.recorder.log(name, BYTES_DOWN, len(received))
                upload = error
            yield name, upload

    def undo(self, name: ClientId) -> None:
        self.hosts.pop(name, None)
        self.new.drop(name)
        self.scores[name] = {}
        self.host(name)
        self._save(name)  # before the first checkpoint, the state is not on disk

    def finish(self, turn: Turn, download: Download, lost: Collection[ClientId]) -> None:
        for name in self:
            host, kept = self.host(name), self.new.kept(name)
            host.finish(download(name), kept, turn, counted=name not in lost)
            host.keep_items(self.folder.keep_items)
            self._save(name)

    def stops(self, name: ClientId, rounds: int) -> bool:
        host = self.hosts.get(name)
        return super().stops(name, rounds) if host is None else host.stops(rounds)

    def restore(self) -> None:
        for name, host in self.hosts.items():
            state, kept = self.new.newest(name)
            assert state is not None, "a checkpoint contains the state of every client"
            host.restore(State.decode(state), decoded(kept))

    def covered(self) -> set[tuple[str, ...]]:
        return self._covered

    def _begin(
        self, name: ClientId, state: State | None, kept: State | None
    ) -> tuple[ClientHost, bytes]:
        """Create a client in its initial state or in a saved state.

        Args:
            name: The client's name.
            state: The client's saved state; None for the initial state.
            kept: The state of the client's best model; None if there is none.

        Returns:
            The client and its first message. The message describes the initial state, even if
            `state` is not None.
        """
        host = ClientHost(self.config, self.base, self.participants[name], self.recorder)
        hello = host.hello()
        if state is not None:
            host.restore(state, kept)
        self.participants[name] = host.participant  # its reference data are slow to compute
        host.scores = self.scores[name]
        return host, hello


def _free(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


LocalRun = Rounds[LocalClients]
local_run = partial(Rounds, LocalClients)
"""Create a run whose clients work in this process.

The arguments are those of `Rounds`, without `clients`.
"""

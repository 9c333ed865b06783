"""The local engine: all clients work in this process, one at a time.

Clients share one copy of each base. Most clients' states are on disk, so memory hardly grows with
the number of clients.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from coterie.engines.clients import Clients, Download, encoded
from coterie.engines.rounds import Rounds
from coterie.engines.runtime import ClientPart
from coterie.errors import Diverged
from coterie.evaluation.evaluate import Score
from coterie.federation.sizes import check_messages, message_sizes
from coterie.messages import State
from coterie.messages.names import BYTES_DOWN
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId
from coterie.turn import Turn

IN_MEMORY = 8
"""The maximum number of clients in memory."""


class LocalClients(Clients, Mapping[ClientId, ClientSide]):
    """A mapping from the names of clients in this process to the method's client-side objects.

    A client is loaded into memory when it is needed. At most IN_MEMORY clients are in memory. If
    this limit is reached, the client that was loaded last is written to disk and removed from
    memory before another client is loaded. All rounds use the clients in the same order. The
    clients that were loaded first therefore stay in memory for all rounds. If the least recently
    used client were removed instead, every client would be read from disk in every round.
    """

    in_process = True

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        self.scores: dict[ClientId, dict[str, dict[str, Score]]] = {
            name: {} for name in self.participants
        }
        self.parts: dict[ClientId, ClientPart] = {}
        self._covered: set[tuple[str, ...]] = set()

    def __getitem__(self, name: ClientId) -> ClientSide:
        """Return the method's client-side object for a client, in the client's newest state."""
        return self.part(name).side

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.participants)

    def __len__(self) -> int:
        """Return the number of clients, including those that are not in memory."""
        return len(self.participants)

    def part(self, name: ClientId) -> ClientPart:
        """Return the `ClientPart` of a client, in the client's newest state."""
        if name not in self.parts:
            if len(self.parts) >= IN_MEMORY:
                self.new.put(encoded(self.parts.popitem()[1].states()))
            self.parts[name], _ = self._begin(name, *self.new.newest(name))
        return self.parts[name]

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        for name in self.participants:
            yield name, self._hello(name)

    def _hello(self, name: ClientId) -> bytes:
        part, hello = self._begin(name, None, None)
        parameters = part.side.parameters()
        check_messages(message_sizes(self.config, parameters, len(self.participants)))
        self._covered.add(part.covered)
        if len(self.parts) < IN_MEMORY:
            self.parts[name] = part
        return hello

    def step(
        self, turn: Turn, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        for name in names:
            received, before = download(name), self.recorder.count
            try:
                upload = self.part(name).step(turn, received, counted=name not in lost)
            except Diverged as error:
                self.recorder.undo(before)
                self.undo(name)
                self.recorder.log(name, BYTES_DOWN, len(received))
                upload = error
            yield name, upload

    def undo(self, name: ClientId) -> None:
        self.parts.pop(name, None)
        self.new.drop(name)
        self.scores[name] = {}
        self.part(name)

    def finish(self, turn: Turn, download: Download, lost: Collection[ClientId]) -> None:
        for name in self:
            part, kept = self.part(name), self.new.kept(name)
            part.finish(download(name), kept, turn, counted=name not in lost)
            part.keep_items(self.folder.keep_items)

    def stops(self, name: ClientId, rounds: int) -> bool:
        part = self.parts.get(name)
        return super().stops(name, rounds) if part is None else part.stops(rounds)

    def _newer(self, name: ClientId) -> Mapping[str, State | None]:
        return dict(self.parts[name].states()) if name in self.parts else {}

    def restore(self) -> None:
        for name, part in self.parts.items():
            state, kept = self.new.newest(name)
            assert state is not None, "the checkpoint lacks the state of a client"
            part.restore(state, kept)

    def covered(self) -> set[tuple[str, ...]]:
        return self._covered

    def _begin(
        self, name: ClientId, state: State | None, kept: State | None
    ) -> tuple[ClientPart, bytes]:
        """Create a client in its initial state or in a saved state.

        Args:
            name: The client's name.
            state: The client's saved state; None for the initial state.
            kept: The state of the client's best model; None if there is none.

        Returns:
            The client and its first message. The message describes the initial state, even if
            `state` is not None.
        """
        part = ClientPart(self.config, self.base, self.participants[name], self.recorder)
        hello = part.hello()
        if state is not None:
            part.restore(state, kept)
        self.participants[name] = part.participant  # its reference data are slow to compute
        part.scores = self.scores[name]
        return part, hello


LocalRun = Rounds[LocalClients]
local_run = partial(Rounds, LocalClients)
"""Create a run whose clients work in this process.

The arguments are those of `Rounds`, without `clients`.
"""

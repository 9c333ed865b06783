"""The local engine: all clients in this process, one at a time.

They share one base in memory. The states of all but a few clients are on disk, so memory hardly
grows with the number of clients.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from coterie.engines.clients import Clients, Download
from coterie.engines.rounds import Rounds
from coterie.engines.runtime import ClientPart
from coterie.errors import Diverged
from coterie.evaluation.evaluate import Score
from coterie.messages import State
from coterie.messages.names import BYTES_DOWN
from coterie.methods.contract import ClientSide
from coterie.training.context import ClientId

IN_MEMORY = 8
"""The largest number of clients in memory at once."""


class LocalClients(Clients, Mapping[ClientId, ClientSide]):
    """Clients in this process; by name, their sides of the method as their last steps left them.

    A client is made when it is asked for; at most IN_MEMORY are in memory. Where there are more, a
    client that is asked for replaces the one that was made last, whose state is written to disk.
    Rounds ask for all clients in turn, so this reads fewer states than replacing the least recently
    used client.
    """

    in_process = True

    def __post_init__(self) -> None:  # noqa: D105
        super().__post_init__()
        self.scores: dict[ClientId, dict[str, dict[str, Score]]] = {
            name: {} for name in self.participants
        }
        self.here: dict[ClientId, ClientPart] = {}
        self._covered: set[tuple[str, ...]] = set()

    def __getitem__(self, name: ClientId) -> ClientSide:
        """Return a client's side, as its last step left it."""
        return self.part(name).side

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.participants)

    def __len__(self) -> int:
        """Return the number of all clients."""
        return len(self.participants)

    def part(self, name: ClientId) -> ClientPart:
        """Return a client's part of the run, as its last step left it."""
        if name not in self.here:
            if len(self.here) >= IN_MEMORY:
                self.new.put(self.here.popitem()[1])
            self.here[name], _ = self._begin(name, *self.new.newest(name))
        return self.here[name]

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """See `Clients`."""
        for name in self.participants:
            yield name, self._hello(name)

    def _hello(self, name: ClientId) -> bytes:
        part, hello = self._begin(name, None, None)
        self._covered.add(part.covered)
        if len(self.here) < IN_MEMORY:
            self.here[name] = part
        return hello

    def step(
        self, round: int, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """See `Clients`."""
        for name in names:
            received, before = download(name), self.recorder.count
            try:
                upload = self.part(name).step(round, received, counted=name not in lost)
            except Diverged as error:
                self.recorder.undo(before)
                self.undo(name)
                self.recorder.log(name, BYTES_DOWN, len(received))
                upload = error
            yield name, upload

    def undo(self, name: ClientId) -> None:
        """See `Clients`."""
        self.here.pop(name, None)
        self.new.drop(name)
        self.scores[name] = {}
        self.part(name)

    def finish(self, round: int, download: Download, lost: Collection[ClientId]) -> None:
        """See `Clients`."""
        for name in self:
            part, kept = self.part(name), self.new.kept(name)
            part.finish(download(name), kept, round, counted=name not in lost)
            part.keep_items(self.folder)

    def stops(self, name: ClientId, rounds: int) -> bool:
        """See `Clients`."""
        return self.here[name].stops(rounds) if name in self.here else super().stops(name, rounds)

    def _newer(self, name: ClientId) -> Mapping[str, State | None]:
        return dict(self.here[name].states()) if name in self.here else {}

    def restore(self) -> None:
        """See `Clients`."""
        for name, part in self.here.items():
            state, kept = self.new.newest(name)
            assert state is not None, "every checkpoint has every client's"
            part.restore(state, kept)

    def covered(self) -> set[tuple[str, ...]]:
        """See `Clients`."""
        return self._covered

    def _begin(
        self, name: ClientId, state: State | None, kept: State | None
    ) -> tuple[ClientPart, bytes]:
        """Make a client that goes on from a state, or from the run's start; and its first message.

        The message comes before the state, which may change what is said of the start.
        """
        part = ClientPart(self.config, self.base, self.participants[name], self.recorder)
        hello = part.hello()
        if state is not None:
            part.restore(state, kept)
        self.participants[name] = part.participant  # its reference takes time to compute
        part.scores = self.scores[name]
        return part, hello


LocalRun = Rounds[LocalClients]
local_run = partial(Rounds, LocalClients)
"""Makes a run whose clients work in this process; see `Rounds`."""

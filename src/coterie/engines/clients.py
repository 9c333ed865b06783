"""The clients of a run whose work is done in turn: few are in memory, the others on disk."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.runtime import ClientPart, LogFor
from coterie.evaluation.evaluate import Score
from coterie.federation import Participant
from coterie.files import read_inside, write_bytes, writing
from coterie.inference.kept import best_of, stops
from coterie.messages import State
from coterie.methods.contract import ClientSide
from coterie.runs import RunFolder
from coterie.training.context import ClientId

STATES = "states"
"""The folder, in a run's folder, of clients' states that are newer than the newest checkpoint."""
IN_MEMORY = 8
"""The largest number of clients in memory at once."""


class NewStates:
    """Clients' states that are newer than the newest checkpoint, in files of the run's folder.

    A kill leaves the files behind. The round is then repeated from the checkpoint without them.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path = folder, folder.path / STATES

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Remove all files when the block begins and when it ends."""
        with writing(self.path):
            if self.path.exists():  # a kill left it
                shutil.rmtree(self.path)
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def put(self, part: ClientPart) -> None:
        """Write what the next checkpoint will have of a client."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        for file, state in part.states():
            if state is not None:
                write_bytes(self.path / f"{file}.safetensors", state.encode())

    def newest(self, client: ClientId) -> tuple[State | None, State | None]:
        """Return a client's state and that of its best model; None before the client's first."""
        state = self._find(f"client-{client}")
        if state is None and self.folder.rounds():
            state = self.folder.load(f"client-{client}")
        return state, self.kept(client)

    def kept(self, client: ClientId) -> State | None:
        """Return the state of a client's best model; None before the client's first round."""
        return self._find(f"kept-{client}") or self.folder.find(f"kept-{client}")

    def pop(
        self, client: ClientId, newer: Mapping[str, State | None]
    ) -> Iterator[tuple[str, State | None]]:
        """Yield what a checkpoint has of a client, and remove the files; see `ClientPart.states`.

        Args:
            client: the client's name.
            newer: states in memory, by file, which replace those on disk.
        """
        for file in (f"client-{client}", f"kept-{client}"):
            state = newer.get(file) or self._find(file)
            (self.path / f"{file}.safetensors").unlink(missing_ok=True)
            if state is not None or self.folder.has(file):
                yield file, state

    def _find(self, file: str) -> State | None:
        try:
            content = read_inside(self.folder.path, f"{STATES}/{file}.safetensors")
        except FileNotFoundError:
            return None
        return State.decode(content)


def begin(
    config: RunConfig,
    base: Base,
    participant: Participant,
    log: LogFor,
    state: State | None,
    kept: State | None,
) -> tuple[ClientPart, bytes]:
    """Make a client that goes on from a state, or from the run's start; and its first message."""
    part = ClientPart(config, base, participant, log)
    hello = part.hello()
    if state is not None:
        part.restore(state, kept)
    return part, hello


class ClientParts(Mapping[ClientId, ClientPart]):
    """Every client's part of a run, by name; a part is made when it is asked for.

    At most IN_MEMORY parts are in memory. Where there are more clients, a part that is asked for
    replaces the part that was made last, whose state is written to disk. Rounds ask for all
    clients in turn, so this reads fewer states than replacing the least recently used part.
    """

    def __init__(
        self,
        config: RunConfig,
        base: Base,
        participants: Sequence[Participant],
        log: LogFor,
        states: NewStates,
    ) -> None:
        self.config, self.base, self.log, self.new = config, base, log, states
        self.participants = {p.name: p for p in participants}
        self.scores: dict[ClientId, dict[str, dict[str, Score]]] = {
            n: {} for n in self.participants
        }
        self.covered: set[tuple[str, ...]] = set()
        """The layers of the bases that clients' adapters modify; see `ClientPart.covered`."""
        self.here: dict[ClientId, ClientPart] = {}

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """Make every client as it is at the run's start; yield its first message."""
        for name in self.participants:
            yield name, self._hello(name)

    def _hello(self, name: ClientId) -> bytes:
        part, hello = self._begin(name, None, None)
        self.covered.add(part.covered)
        if len(self.here) < IN_MEMORY:
            self.here[name] = part
        return hello

    def __getitem__(self, name: ClientId) -> ClientPart:
        """Return a client's part, as its last step left it."""
        if name not in self.here:
            if len(self.here) >= IN_MEMORY:
                self.new.put(self.here.popitem()[1])
            self.here[name], _ = self._begin(name, *self.new.newest(name))
        return self.here[name]

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.participants)

    def __len__(self) -> int:
        """Return the number of all clients."""
        return len(self.participants)

    def begin_anew(self, name: ClientId) -> None:
        """Take a client back to the newest checkpoint, or to the run's start."""
        del self.here[name]
        self.scores[name] = {}
        self.here[name], _ = self._begin(name, *self.new.newest(name))

    def restore(self) -> None:
        """Take every client back to the newest checkpoint."""
        for name, part in self.here.items():
            state, kept = self.new.newest(name)
            assert state is not None, "every checkpoint has every client's"
            part.restore(state, kept)

    def stop(self, name: ClientId, rounds: int) -> bool:
        """Return whether a client takes no part in rounds after so many."""
        if name in self.here:
            return self.here[name].stops(rounds)
        return stops(self.config, best_of(self.new.kept(name)), rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """Yield what a checkpoint has of the clients; see `ClientPart.states`."""
        for name in self.participants:
            newer = self.here[name].states() if name in self.here else ()
            yield from self.new.pop(name, dict(newer))

    def _begin(
        self, name: ClientId, state: State | None, kept: State | None
    ) -> tuple[ClientPart, bytes]:
        part, hello = begin(self.config, self.base, self.participants[name], self.log, state, kept)
        self.participants[name] = part.participant  # its reference takes time to compute
        part.scores = self.scores[name]
        return part, hello


class ClientSides(Mapping[ClientId, ClientSide]):
    """Every client's side of the method, by name."""

    def __init__(self, parts: ClientParts) -> None:
        self.parts = parts

    def __getitem__(self, name: ClientId) -> ClientSide:
        """Return a client's side, as its last step left it."""
        return self.parts[name].side

    def __iter__(self) -> Iterator[ClientId]:
        """Iterate over the names of all clients."""
        return iter(self.parts)

    def __len__(self) -> int:
        """Return the number of all clients."""
        return len(self.parts)

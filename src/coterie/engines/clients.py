"""The interface between the round loop and clients, and clients' states between checkpoints."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.errors import Diverged
from coterie.federation.participants import Participant
from coterie.files import read_inside, write_bytes, writing
from coterie.inference.kept import best_of, stops
from coterie.messages import State
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId
from coterie.turn import Turn

STATES = "states"
"""The folder of `NewStates` in a run folder."""
Download = Callable[[ClientId], bytes]
"""A function that returns the server's current download for a client."""


def encoded(states: Iterable[tuple[str, State | None]]) -> Iterator[tuple[str, bytes]]:
    """Serialise the states that `ClientPart.states` yields, and leave out states that are None."""
    return ((file, state.encode()) for file, state in states if state is not None)


class NewStates:
    """Clients' states that are newer than the newest checkpoint, stored as files in the run folder.

    If the process is killed, the files remain. The next process deletes them, and repeats the round
    from the checkpoint.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path = folder, folder.path / STATES

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Return a context manager that removes all files on entry and on exit."""
        with writing(self.path):
            if self.path.exists():  # the last process was killed
                shutil.rmtree(self.path)
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def put(self, states: Iterable[tuple[str, bytes]]) -> None:
        """Write a client's states to files; the next checkpoint will contain these states.

        Args:
            states: The result of `encoded`.
        """
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        for file, state in states:
            write_bytes(self.path / f"{file}.safetensors", state)

    def newest(self, client: ClientId) -> tuple[State | None, State | None]:
        """Return the newest state of a client, and the newest state of the client's best model.

        Each of the two states is None if it has not been saved yet.
        """
        state = self._find(f"client-{client}")
        if state is None and self.folder.turns():
            state = self.folder.load(f"client-{client}")
        return state, self.kept(client)

    def kept(self, client: ClientId) -> State | None:
        """Return the newest state of a client's best model; None if no state has been saved yet."""
        return self._find(f"kept-{client}") or self.folder.find(f"kept-{client}")

    def drop(self, client: ClientId) -> None:
        """Delete a client's states, so that the states in the newest checkpoint are used again."""
        for file in (f"client-{client}", f"kept-{client}"):
            (self.path / f"{file}.safetensors").unlink(missing_ok=True)

    def pop(
        self, client: ClientId, newer: Mapping[str, State | None]
    ) -> Iterator[tuple[str, State | None]]:
        """Remove a client's states and yield them for a checkpoint.

        Args:
            client: The client's name.
            newer: A mapping from the names of files to the states in memory. States in memory take
                precedence over states on disk.

        Yields:
            Pairs of a file's name and a state. The state can be None, as in `ClientPart.states`.
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


@dataclass(eq=False)
class Clients(ABC):
    """The clients of a run. A subclass determines the processes in which the clients work.

    Args:
        config: The run.
        base: The run's base.
        participants: The data of each client; the keys are clients' names.
        folder: The run folder.
        recorder: The recorder of metrics.
    """

    config: RunConfig
    base: Base
    participants: dict[ClientId, Participant]
    folder: RunFolder
    recorder: Recorder

    in_process: ClassVar[bool]
    """Whether the clients are in this process. If so, they can join outside `at_work`."""

    def __post_init__(self) -> None:  # noqa: D105
        self.new = NewStates(self.folder)

    def at_work(self) -> AbstractContextManager[object]:
        """Return a context manager in which the clients can work."""
        return self.new.emptied()

    @abstractmethod
    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """Create all clients in their initial states; yield their names and first messages."""

    @abstractmethod
    def step(
        self, turn: Turn, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """Let clients execute a turn.

        A client that diverges returns to the state that it had before the turn.

        Args:
            turn: The turn.
            names: The clients that take part.
            download: A function that returns the server's download for a client.
            lost: The clients whose last upload was not accepted.

        Yields:
            A pair of a client's name and the client's upload. If the client diverged, the pair has
            the error instead of an upload. The client's metrics are recorded before the pair is
            yielded.
        """

    @abstractmethod
    def finish(self, turn: Turn, download: Download, lost: Collection[ClientId]) -> None:
        """Let every client apply the download after the last turn.

        Args:
            turn: The last turn.
            download: A function that returns the server's download for a client.
            lost: The clients whose last upload was not accepted.
        """

    def stops(self, name: ClientId, rounds: int) -> bool:
        """Return whether a client stops training early.

        Args:
            name: The client's name.
            rounds: The number of complete rounds.
        """
        return stops(self.config, best_of(self.new.kept(name)), rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """Yield the clients' states for a checkpoint, as in `ClientPart.states`."""
        for name in self.participants:
            yield from self.new.pop(name, self._newer(name))

    def _newer(self, name: ClientId) -> Mapping[str, State | None]:
        """Return a client's states in memory, which are newer than the client's states on disk.

        The keys are the names of files, as in `ClientPart.states`. The result is empty if no state
        of the client is in memory.
        """
        return {}

    @abstractmethod
    def undo(self, name: ClientId) -> None:
        """Restore the state that a client had before an exchange whose upload was not accepted."""

    @abstractmethod
    def restore(self) -> None:
        """Restore every client's state from the newest checkpoint."""

    @abstractmethod
    def covered(self) -> set[tuple[str, ...]]:
        """Return lines of text that describe which layers each kind of adapter modifies."""

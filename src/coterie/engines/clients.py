"""The interface between the round loop and clients, and clients' states between checkpoints."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.errors import Diverged
from coterie.federation.participants import Participant
from coterie.files import writing
from coterie.inference.kept import best_of, stops
from coterie.messages import State
from coterie.runs import Recorder, RunFolder
from coterie.runs.state_file import StateFile
from coterie.training.context import ClientId
from coterie.turn import Turn

STATES = "states"
"""The folder of `NewStates` in a run folder."""
Download = Callable[[ClientId], bytes]
"""A function that returns the server's current download for a client."""


def encoded(states: Iterable[tuple[str, State | None]]) -> Iterator[tuple[str, bytes]]:
    """Serialise the states that `ClientHost.states` yields, and leave out states that are None."""
    return ((file, state.encode()) for file, state in states if state is not None)


def decoded(state: bytes | None) -> State | None:
    """Decode a serialised state, unless it is None."""
    return None if state is None else State.decode(state)


class NewStates:
    """Clients' states that are newer than the newest checkpoint, stored as files in the run folder.

    A state is new until its turn is complete, and can be dropped if the client's upload is not
    accepted. The next checkpoint adopts the files. If the process is killed, the files remain. The
    next process deletes them, and repeats the rounds since the checkpoint.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path = folder, folder.path / STATES
        self._new: dict[str, StateFile] = {}
        """The states of the turn in progress. Keys are names of files, without extensions."""
        self._complete: dict[str, StateFile] = {}
        """The states of complete turns."""

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Return a context manager that removes all files on entry and on exit."""
        self._new.clear()
        self._complete.clear()
        with writing(self.path):
            if self.path.exists():  # the last process was killed
                shutil.rmtree(self.path)
        try:
            yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def put(self, states: Iterable[tuple[str, bytes]]) -> None:
        """Write a client's states to files.

        Args:
            states: The result of `encoded`.
        """
        for file, state in states:
            name = f"{STATES}/{file}.new"
            self._new[file] = StateFile.write(self.folder.path, name, state)

    def newest(self, client: ClientId) -> tuple[bytes | None, bytes | None]:
        """Return the newest state of a client, and the newest state of the client's best model.

        Each of the two states is serialised, or None if it has not been saved yet.
        """
        state = self._find(f"client-{client}")
        if state is None and self.folder.turns():
            state = self.folder.read(f"client-{client}.safetensors")
        return state, self._find(f"kept-{client}")

    def kept(self, client: ClientId) -> State | None:
        """Return the newest state of a client's best model; None if no state has been saved yet."""
        return decoded(self._find(f"kept-{client}"))

    def drop(self, client: ClientId) -> None:
        """Delete a client's states of the turn in progress; earlier states are used again."""
        for file in (f"client-{client}", f"kept-{client}"):
            if (stored := self._new.pop(file, None)) is not None:
                stored.delete()

    def complete(self) -> None:
        """End the turn in progress, whose states can no longer be dropped."""
        for file, stored in self._new.items():
            complete = replace(stored, name=f"{STATES}/{file}.safetensors")
            stored.move(self.folder.path / complete.name, durable=False)
            self._complete[file] = complete
        self._new.clear()

    def pop(self, client: ClientId) -> Iterator[tuple[str, StateFile | None]]:
        """Yield a client's states of complete turns for a checkpoint, which adopts their files.

        Yields:
            Pairs of a file's name and a state. The state is None if the file in the previous
            checkpoint is still valid.
        """
        for file in (f"client-{client}", f"kept-{client}"):
            stored = self._complete.pop(file, None)
            if stored is not None or self.folder.has(file):
                yield file, stored

    def _find(self, file: str) -> bytes | None:
        stored = self._new.get(file) or self._complete.get(file)
        if stored is not None:
            return stored.read()
        return self.folder.read(f"{file}.safetensors") if self.folder.has(file) else None


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

    def states(self) -> Iterator[tuple[str, StateFile | None]]:
        """Yield the clients' states for a checkpoint, as in `NewStates.pop`."""
        for name in self.participants:
            yield from self.new.pop(name)

    @abstractmethod
    def undo(self, name: ClientId) -> None:
        """Restore the state that a client had before an exchange whose upload was not accepted."""

    @abstractmethod
    def restore(self) -> None:
        """Restore every client's state from the newest checkpoint."""

    @abstractmethod
    def covered(self) -> set[tuple[str, ...]]:
        """Return lines of text that describe which layers each kind of adapter modifies."""

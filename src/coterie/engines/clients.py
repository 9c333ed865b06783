"""Clients of a run, and their newest states on disk between their steps."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.runtime import ClientPart
from coterie.errors import Diverged
from coterie.federation.participants import Participant
from coterie.files import read_inside, write_bytes, writing
from coterie.inference.kept import best_of, stops
from coterie.messages import State
from coterie.runs import Recorder, RunFolder
from coterie.training.context import ClientId

STATES = "states"
"""The folder, in a run's folder, of clients' states that are newer than the newest checkpoint."""
Download = Callable[[ClientId], bytes]
"""Returns what the server sends to a client now."""


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

    def drop(self, client: ClientId) -> None:
        """Remove what is newer than the newest checkpoint of a client."""
        for file in (f"client-{client}", f"kept-{client}"):
            (self.path / f"{file}.safetensors").unlink(missing_ok=True)

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


@dataclass(eq=False)
class Clients(ABC):
    """The clients of a run: where they work, and what they keep between rounds."""

    config: RunConfig
    base: Base
    participants: dict[ClientId, Participant]
    folder: RunFolder
    recorder: Recorder

    in_process: ClassVar[bool]
    """Whether they are made in this process, and so can join before they are at work."""

    def __post_init__(self) -> None:  # noqa: D105
        self.new = NewStates(self.folder)

    def at_work(self) -> AbstractContextManager[object]:
        """Return a block within which the clients can work."""
        return self.new.emptied()

    @abstractmethod
    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """Make every client as it is at the run's start; yield its first message."""

    @abstractmethod
    def step(
        self, round: int, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """Train clients for a round; yield their uploads, once their entries are recorded.

        A client that diverged has no upload, and its state from before the round.

        Args:
            round: the round, 0 for the first.
            names: the clients of the round.
            download: returns what the server sends to a client.
            lost: clients whose last upload did not count.
        """

    @abstractmethod
    def finish(self, round: int, download: Download, lost: Collection[ClientId]) -> None:
        """Let every client receive the download after the last round; see `step`."""

    def stops(self, name: ClientId, rounds: int) -> bool:
        """Return whether a client takes no part in rounds after so many."""
        return stops(self.config, best_of(self.new.kept(name)), rounds)

    def states(self) -> Iterator[tuple[str, State | None]]:
        """Yield what a checkpoint has of the clients; see `ClientPart.states`."""
        for name in self.participants:
            yield from self.new.pop(name, self._newer(name))

    def _newer(self, name: ClientId) -> Mapping[str, State | None]:
        """Return states of a client that are in memory, by file."""
        return {}

    @abstractmethod
    def undo(self, name: ClientId) -> None:
        """Take a client, whose upload does not count, back to before the round."""

    @abstractmethod
    def restore(self) -> None:
        """Take every client back to the newest checkpoint."""

    @abstractmethod
    def covered(self) -> set[tuple[str, ...]]:
        """Return the layers of the bases that clients' adapters modify."""

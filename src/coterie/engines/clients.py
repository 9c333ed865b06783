"""Clients between their steps: their newest states on disk, and how one is made anew."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from coterie.bases import Base
from coterie.config.run import RunConfig
from coterie.engines.runtime import ClientPart, LogFor
from coterie.federation.participants import Participant
from coterie.files import read_inside, write_bytes, writing
from coterie.messages import State
from coterie.runs import RunFolder
from coterie.training.context import ClientId

STATES = "states"
"""The folder, in a run's folder, of clients' states that are newer than the newest checkpoint."""


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

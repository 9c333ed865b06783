"""Storage of states on disk, so that a server need not keep all clients' tensors in memory."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import WeakSet

from coterie.files import writing
from coterie.messages import State


class Stored:
    """A state in the file of a `Store`. The space can be reused after this object is deleted.

    Args:
        store: The store.
        start: The position of the encoded state in the file.
        length: The number of bytes of the encoded state.
        groups: The names of the tensors, by group.
    """

    def __init__(
        self, store: "Store", start: int, length: int, groups: Mapping[str, Collection[str]]
    ) -> None:
        self.store, self.start, self.length, self.groups = store, start, length, groups
        self.saved: Path | None = None
        """The file of the newest checkpoint that contains the state."""
        store.used += length

    def __del__(self) -> None:  # noqa: D105
        self.store.used -= self.length

    def encode(self) -> bytes:
        """Return the encoded state."""
        return self.store.read(self.start, self.length)

    def load(self) -> State:
        """Return the state."""
        return State.decode(self.encode())


class Store:
    """States in an unnamed temporary file, which disappears if the process is killed.

    Args:
        folder: The folder of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0
        self.used = 0
        """The number of bytes of the states that have not been deleted."""
        self._stored: WeakSet[Stored] = WeakSet()
        self._file = self._new_file()

    def _new_file(self) -> Any:
        with writing(self.folder):
            return TemporaryFile(dir=self.folder, buffering=0)

    def put(self, state: State) -> Stored:
        """Write a state to the file.

        Raises:
            Unwritable: The state cannot be written.
        """
        data = state.encode()
        if self.size > 2 * (len(data) + self.used):
            self._compact()
        self._write(self._file, data, self.size)
        groups = {name: {*tensors} for name, tensors in state.groups.items()}
        stored = Stored(self, self.size, len(data), groups)
        self._stored.add(stored)
        self.size += len(data)
        return stored

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file."""
        pieces: list[bytes] = []
        while length > 0 and (piece := os.pread(self._file.fileno(), length, start)):
            pieces.append(piece)  # the system may return fewer bytes than requested
            start, length = start + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _write(self, file: Any, data: bytes, start: int) -> None:
        rest = memoryview(data)
        with writing(self.folder):
            while rest:
                written = os.pwrite(file.fileno(), rest, start)
                rest, start = rest[written:], start + written

    def _compact(self) -> None:
        """Copy all states to a new file, without the gaps that deleted states have left."""
        file, size, starts = self._new_file(), 0, dict[Stored, int]()
        for stored in sorted(self._stored, key=lambda stored: stored.start):
            self._write(file, stored.encode(), size)
            starts[stored] = size
            size += stored.length
        self._file, self.size = file, size
        for stored, start in starts.items():
            stored.start = start

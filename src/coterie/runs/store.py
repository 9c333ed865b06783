"""States that wait on disk, so that a server has one client's tensors in memory at a time."""

from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from weakref import WeakSet

from coterie.files import writing
from coterie.messages import State


class Stored:
    """A state in the file of a `Store`. Its space is free when this object is deleted.

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
        self._stored: WeakSet[Stored] = WeakSet()
        with writing(folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)

    def put(self, state: State) -> Stored:
        """Write a state to the file.

        Raises:
            Unwritable: The state cannot be written.
        """
        data = state.encode()
        with writing(self.folder):
            if self.size > 2 * (len(data) + sum(stored.length for stored in self._stored)):
                self._compact()
            self._file.seek(self.size)
            self._file.write(data)
            self._file.flush()
        groups = {name: {*tensors} for name, tensors in state.groups.items()}
        stored = Stored(self, self.size, len(data), groups)
        self._stored.add(stored)
        self.size += len(data)
        return stored

    def read(self, start: int, length: int) -> bytes:
        """Return bytes of the file."""
        self._file.seek(start)
        return self._file.read(length)

    def _compact(self) -> None:
        """Close the gaps that deleted states have left in the file."""
        self.size = 0
        for stored in sorted(self._stored, key=lambda stored: stored.start):
            data = stored.encode()
            self._file.seek(self.size)
            self._file.write(data)
            stored.start = self.size
            self.size += stored.length
        self._file.truncate(self.size)

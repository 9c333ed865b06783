"""Messages that wait on disk, so that the server holds only one of them in memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

from coterie.files import writing
from coterie.messages import Message, State


class Store:
    """One message per client, in an unnamed temporary file.

    The file disappears if the process is killed, and needs only one file descriptor for any number
    of clients.

    Args:
        folder: The folder of the temporary file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, tuple[int, int]] = {}
        """The start and the length of each client's message in the file."""
        with writing(folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as this object)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the clients whose messages are stored, sorted by name."""
        return iter(sorted(self._places))

    def put(self, client: str, message: Message) -> None:
        """Store a client's message."""
        values = {"round": message.round, "values": dict(message.values)}
        body = State(message.groups, values).encode()  # a decoded message may be of any size
        with writing(self.folder):
            start = self._file.seek(0, os.SEEK_END)
            if start > 2 * (len(body) + sum(length for _, length in self._places.values())):
                start = self._compact()
            self._file.write(body)
            self._file.flush()
        self._places[client] = start, len(body)

    def get(self, client: str) -> Message:
        """Return a client's message."""
        start, length = self._places[client]
        self._file.seek(start)
        state = State.decode(self._file.read(length))
        return Message(groups=state.groups, **state.values)

    def drop(self, client: str) -> bool:
        """Remove a client's message; return whether there was one."""
        return self._places.pop(client, None) is not None

    def clear(self) -> None:
        """Remove all messages."""
        self._places.clear()
        self._file.truncate(0)

    def _compact(self) -> int:
        """Close the gaps that removed messages have left in the file; return the new size."""
        end = 0
        for client, (start, length) in sorted(self._places.items(), key=lambda item: item[1]):
            self._file.seek(start)
            body = self._file.read(length)
            self._file.seek(end)
            self._file.write(body)
            self._places[client] = end, length
            end += length
        self._file.truncate(end)
        return self._file.seek(end)

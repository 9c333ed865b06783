"""Stores orders and replies in files, so that memory use does not grow with their size or number.

A server that restarts deletes the files and sends its orders again. A client that has already
executed an order sends the reply that it has stored.
"""

import hashlib
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import CoterieError
from coterie.files import open_regular, read_file
from coterie.network.protocol import Offer


class OrderFiles:
    """The folder in which orders and replies are stored.

    Args:
        folder: The folder. Files that it already contains are deleted.

    Raises:
        CoterieError: The folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
        except OSError as error:
            raise CoterieError(f"Could not use the folder {folder}: {error.strerror}.") from None

    def write(self, data: bytes, seconds: float) -> "Order":
        """Write an order to a file.

        Args:
            data: The order.
            seconds: The time after which the order expires if the client has not downloaded it.

        Raises:
            CoterieError: The file cannot be written.
        """
        path = self.folder / (ticket := secrets.token_hex(16))
        try:
            path.write_bytes(data)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise CoterieError(
                f"Could not write an order to {self.folder}: {error.strerror}. Correct this, and "
                "continue with --resume."
            ) from None
        offer = Offer(ticket=ticket, size=len(data), digest=hashlib.sha256(data).hexdigest())
        return Order(offer, path, time.monotonic() + seconds)


@dataclass(eq=False)
class Order:
    """A stored order, and the part of the reply that has arrived."""

    offer: Offer
    path: Path
    expires: float
    """The time on the monotonic clock at which the order expires, unless it has been downloaded."""
    downloaded: bool = False
    received: int = 0
    """The number of bytes of the reply that have arrived."""
    hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    """The SHA-256 of the bytes of the reply that have arrived."""

    @property
    def reply(self) -> Path:
        """The file of the reply."""
        return self.path.with_suffix(".reply")

    def append(self, piece: bytes) -> None:
        """Append bytes to the reply; raise OSError if they cannot be written."""
        flags = os.O_RDWR | (0 if self.received else os.O_CREAT | os.O_TRUNC)
        with open(open_regular(self.reply, flags), "r+b") as file:
            file.seek(self.received)  # an earlier write may have failed after some bytes
            file.write(piece)
        self.received += len(piece)
        self.hash.update(piece)

    def restart(self) -> None:
        """Discard the bytes of the reply that have arrived."""
        self.reply.unlink(missing_ok=True)
        self.received, self.hash = 0, hashlib.sha256()

    def take(self) -> bytes:
        """Return the complete reply, and delete its file; raise OSError if it cannot be read."""
        data = read_file(self.reply)
        self.delete()
        return data

    def delete(self) -> None:
        """Delete the files. A file that cannot be deleted remains until the server restarts."""
        for path in (self.path, self.reply):
            with suppress(OSError):
                path.unlink(missing_ok=True)

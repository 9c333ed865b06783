"""States that are newer than the newest checkpoint, in files that the next checkpoint adopts."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Self

from coterie.errors import CoterieError
from coterie.files import make_folder, read_inside, refuse_links, sync, write_bytes, writing


def checksum(data: bytes) -> str:
    """Return the hash with which checkpoints detect damaged files."""
    return blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class StateFile:
    """A serialised state in a file that a restart deletes, and its hash."""

    folder: Path
    """The run folder."""
    name: str
    """The path of the file inside the run folder."""
    checksum: str

    @classmethod
    def write(cls, folder: Path, name: str, data: bytes) -> Self:
        """Write a serialised state to a file without flushing it to disk."""
        path = folder / name
        with writing(path):
            if not path.parent.exists():
                make_folder(path.parent)
        write_bytes(path, data, durable=False)
        return cls(folder, name, checksum(data))

    def read(self) -> bytes:
        """Return the serialised state; raise CoterieError if it cannot be read."""
        try:
            return read_inside(self.folder, self.name)
        except OSError as error:
            raise CoterieError(
                f"{self.folder / self.name} cannot be read ({error.strerror}); continue the run "
                "with --resume."
            ) from error

    def move(self, path: Path, *, durable: bool = True) -> None:
        """Move the file to another path in the run folder, and flush it to disk if `durable`."""
        refuse_links(self.folder, self.name)
        with writing(path):
            (self.folder / self.name).replace(path)
            if durable:
                sync(path)

    def delete(self) -> None:
        """Delete the file."""
        (self.folder / self.name).unlink(missing_ok=True)

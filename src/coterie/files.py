"""Atomic file writes: a killed process or a full disk never leaves a partly written file."""

import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import file_digest
from logging.handlers import RotatingFileHandler
from pathlib import Path, PurePath
from typing import IO, Any

from coterie.errors import CoterieError, Unwritable

NOT_REGULAR = "It is not a file"
"""The message of the OSError for a device, a socket or a pipe."""
LOG_BYTES = 10 * 2**20
"""Maximum size of a log file in bytes; a larger file is rotated."""


def path_part(name: str) -> str:
    """Convert a name to a path component: "AG News, low" becomes "AG-News-low".

    Returns:
        The component; "" if the name contains no permitted character.
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")


def expanded(path: str) -> Path:
    """Expand a leading `~` or `~USER` to a home folder.

    Raises:
        CoterieError: This machine has no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CoterieError(
            f"{path}: the home folder of this user is unknown; correct the path."
        ) from None


BRACKETS = rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]'
"""A pattern for a JSON string, or for a bracket outside strings."""
MOST_NESTED = 600
"""Maximum depth of nested lists and mappings in JSON."""


def parse_json(text: str | bytes, *, missing: bool = False) -> Any:
    """Parse JSON.

    Args:
        text: A JSON document.
        missing: Whether to treat every NaN or infinity in the document as a missing value, and to
            replace it with None in the result. By default, NaN and infinity are parsed as floats,
            although they are not valid JSON.

    Raises:
        ValueError: The text is not JSON, is too deeply nested, or contains an integer with too many
            digits.
    """
    check_nesting(text)
    try:
        return json.loads(text, parse_constant=(lambda _: None) if missing else None)
    except RecursionError:  # the caller's own calls are deep
        raise ValueError("it is nested too deeply") from None


def check_nesting(text: str | bytes) -> None:
    """Raise ValueError if JSON is nested more than MOST_NESTED levels deep.

    Up to this depth, recursive functions can process the parsed value. Python's own limit on
    recursion is not used, because it depends on the version of Python and on the calls that are in
    progress.
    """
    data = text.encode(errors="replace") if isinstance(text, str) else text
    if data.count(b"[") + data.count(b"{") <= MOST_NESTED:
        return
    depth = 0
    for match in re.finditer(BRACKETS, data, re.DOTALL):
        first = data[match.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MOST_NESTED:
            raise ValueError("it is nested too deeply")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `Unwritable` if the `with` block raises OSError, for example because the disk is full.

    Args:
        path: The file or folder that is written, which the error message names.
    """
    try:
        yield
    except OSError as error:
        raise Unwritable(f"Could not write {path}: {error.strerror or error}.") from error


def open_regular(path: Path | str, flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file, and return its descriptor.

    Opening a pipe would otherwise wait, possibly for ever, until another process opens the pipe.
    Every function that opens a file which another program may have replaced therefore calls this
    function.

    Args:
        path: The file. A symbolic link is followed unless `flags` contains O_NOFOLLOW.
        flags: Flags of `os.open`. A new file is readable by its owner only.
        folder: The descriptor of the folder that a relative path refers to.

    Raises:
        OSError: The file cannot be opened, or is a folder, a device, a socket or a pipe.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600, dir_fd=folder)
    try:
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading; see `open_regular`."""
    return open(open_regular(path), "rb")


def read_file(path: Path, most: int = -1) -> bytes:
    """Return the content of a regular file; see `open_regular`.

    Args:
        path: The file.
        most: The maximum number of bytes to read; by default, the whole file is read.

    Raises:
        OSError: The file cannot be read.
    """
    with open_file(path) as file:
        return file.read(most)


def refuse_special(*paths: Path) -> None:
    """Raise OSError if a file that another library opens is a folder, a device or a pipe."""
    for path in paths:
        os.close(open_regular(path))


def read_inside(folder: Path, name: str | PurePath) -> bytes:
    """Return the content of a regular file inside a folder.

    Neither the file nor an intermediate folder may be a symbolic link. Through a link, anybody with
    write access to the folder could make another user read and disclose any file.

    Raises:
        CoterieError: A component of the path is a symbolic link.
        OSError: The file cannot be read, or is a folder, a device or a pipe.
    """
    refuse_links(folder, name)  # gives a clearer error than O_NOFOLLOW
    *between, last = PurePath(name).parts
    opened = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY)]
    try:
        for part in between:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            opened.append(os.open(part, flags, dir_fd=opened[-1]))
        with open(open_regular(last, os.O_RDONLY | os.O_NOFOLLOW, opened[-1]), "rb") as file:
            return file.read()
    finally:
        for descriptor in opened:
            os.close(descriptor)


def refuse_links(folder: Path, name: str | PurePath) -> None:
    """Raise CoterieError if a file inside a folder, or an intermediate folder, is a link."""
    path = folder
    for part in PurePath(name).parts:
        path = path / part
        if path.is_symlink():
            raise CoterieError(
                f"{path} is a symbolic link; links inside a run folder are never followed. Replace "
                "the link with its target."
            )


def append_to(path: Path) -> IO[str]:
    """Open a text file for appending; a new file is readable by its owner only.

    Raises:
        CoterieError: The file is a symbolic link.
        OSError: The file cannot be opened.
    """
    refuse_links(path.parent, path.name)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return open(open_regular(path, flags), "a", encoding="utf-8")


class LogFile(RotatingFileHandler):
    """A rotating log that is never written through a symbolic link.

    A full log file is renamed to NAME.log.1, and replaces the previous file of this name.

    Raises:
        CoterieError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with writing(path):
            super().__init__(path, maxBytes=LOG_BYTES, backupCount=1)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def _open(self) -> Any:
        return append_to(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a failed write to the log file, for example when the disk is full.

        The terminal still shows the log record.
        """


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, or create it if it is missing.

    A new lock file is readable by its owner only.

    Raises:
        CoterieError: The file is a symbolic link, or cannot be opened.
    """
    with writing(path):
        return append_to(path)


def write_bytes(path: Path, data: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
    """Replace a file atomically.

    The data are written to a temporary file, which is flushed to disk and then renamed. If several
    processes write the file at once, the last process wins.

    Args:
        path: The file to replace or create.
        data: The new content.
        mode: The permissions of the file before the umask is applied; by default, 0o666 (octal).
            The file has these permissions as soon as it is created.
        durable: Whether the file must survive a power failure. If not, it is not flushed to disk.

    Raises:
        CoterieError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)
            # O_EXCL: nobody else with write access can put a link in the temporary file's place.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(temporary, flags, mode), "wb") as file:
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                _hand_over(file.fileno(), path.parent)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably; only its owner may read it."""
    write_bytes(path, data, mode=0o600)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically; NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def cache_path(kind: str, name: str) -> Path:
    """Return the path of a file in Coterie's cache: $COTERIE_CACHE, or else ~/.cache/coterie.

    The cache can be deleted at any time.

    Args:
        kind: The name of the file's folder in the cache.
        name: The name of the file.

    Raises:
        RuntimeError: The user has no home folder.
    """
    setting = os.environ.get("COTERIE_CACHE")
    return (Path(setting) if setting else Path.home() / ".cache/coterie") / kind / name


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file atomically; create the file if it is missing."""
    with writing(path):
        before = read_file(path) if path.exists() else b""
    between = b"" if before.endswith(b"\n") or not before else b"\n"
    write_bytes(path, before + between + line.encode() + b"\n")


def link(path: Path, new: Path) -> None:
    """Create a hard link to an existing file, or copy the file if hard links are not supported.

    Args:
        path: The existing file. It must never be modified afterwards, because the link would change
            too.
        new: The path of the link or copy to create.
    """
    with writing(new):
        try:
            os.link(path, new)
        except OSError:
            shutil.copyfile(path, new)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically.

    Args:
        path: The folder to create.
        fill: Function that writes the files. The argument of the function is the path of a
            temporary folder, which is then renamed to `path`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(path):
        try:
            make_folder(temporary)
            fill(temporary)
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(path.parent)


def make_folder(path: Path) -> None:
    """Create a folder, and transfer it to the owner of its parent if this process runs as root."""
    path.mkdir(parents=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _hand_over(descriptor, path.parent)
    finally:
        os.close(descriptor)


def _hand_over(descriptor: int, folder: Path) -> None:
    """Transfer a new file to the owner of its folder, if this process runs as root.

    A service that runs as the owner of the folder can then read the file.

    Args:
        descriptor: The descriptor of the open file.
        folder: The folder that contains the file.
    """
    if os.geteuid() == 0:
        owner = folder.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def sync(path: Path) -> None:
    """Flush a file to disk, or a folder, so that renames inside it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file.

    A process reads a file only once, as long as the file's size and its time of change stay.
    """
    status = file.stat()
    return _sha256_of(file, status.st_size, status.st_mtime_ns)


@lru_cache
def _sha256_of(file: Path, size: int, modified: int) -> str:
    del size, modified
    with open(open_regular(file), "rb") as opened:
        return file_digest(opened, "sha256").hexdigest()

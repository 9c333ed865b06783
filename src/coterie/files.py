"""Writing files so that a kill or a full disk leaves the old content or the new, never half."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError


def path_part(name: str) -> str:
    """A name as part of a path: "AG News, low" -> AG-News-low; empty if nothing of it is left."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-_")


def expanded(path: str) -> Path:
    """A path in which a leading ~ stands for a user's home; raises CoterieError for nobody's."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise CoterieError(f"{path}: this machine has no home folder of that user.") from None


def parse_json(text: str | bytes, *, missing: bool = False) -> Any:
    """Parse JSON.

    Args:
        text: a JSON document.
        missing: return NaN and infinity, which are not JSON, as None.

    Raises:
        ValueError: The text is not JSON, too deeply nested, or has an integer of too many digits.
    """
    try:
        return json.loads(text, parse_constant=(lambda _: None) if missing else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system says about a write (full, read-only, ...) into a CoterieError."""
    try:
        yield
    except OSError as error:
        raise CoterieError(f"Could not write {path}: {error.strerror or error}.") from error


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace a file atomically: temporary file, fsync, rename.

    mode: its permissions, less the umask; at no moment does it have others. Of several processes
    that write it at once, the last one's content stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _hand_over(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_private(path: Path, data: bytes) -> None:
    """Replace a file that its owner alone may read, and make sure that it is there."""
    write_bytes(path, data, mode=0o600)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add a line to a text file, or begin one with it, atomically."""
    with writing(path):
        before = path.read_bytes() if path.exists() else b""
    between = b"" if before.endswith(b"\n") or not before else b"\n"
    write_bytes(path, before + between + line.encode() + b"\n")


def link(path: Path, new: Path) -> None:
    """Give a file that nobody changes a second name; copy it where the file system has no links."""
    with writing(new):
        try:
            os.link(path, new)
        except OSError:
            shutil.copyfile(path, new)


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder that appears whole or not at all; `fill` writes files into a temporary one."""
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(path):
        try:
            temporary.mkdir(parents=True)
            _hand_over(temporary)
            fill(temporary)
            temporary.replace(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(path.parent)


def _hand_over(path: Path) -> None:
    """Give what root has written to the owner of its folder: a service that runs as another user
    must be able to read it."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)


def sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

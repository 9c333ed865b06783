"""The size of this machine's main memory, what is free of it, and what this process has used."""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

CONTAINER = Path("/sys/fs/cgroup")
"""The folder with a container's memory limit and its use of memory."""
MEMORY = Path("/proc/meminfo")
"""Linux's file with the use of memory, in KiB."""

MMAP_THRESHOLD = -3
"""The parameter M_MMAP_THRESHOLD of glibc's function mallopt."""


def return_freed_memory() -> None:
    """Return the memory of each freed tensor to the system at once, where the C library is glibc.

    By default, glibc keeps freed blocks of up to 32 MiB. Before version 2.38, it often cannot use
    them for another tensor, so a server's memory grew to several times the size of its tensors. A
    training step would be slower without these blocks.
    """
    with suppress(OSError, AttributeError, TypeError):  # the C library is another one
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)


def main_memory() -> int:
    """Return this machine's main memory in bytes, or its container's limit if that is lower."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        limit = (CONTAINER / "memory.max").read_text(encoding="ascii")  # a number, or `max`
        size = min(size, int(limit))
    return size


def free_memory() -> int:
    """Return the main memory that processes can still use, in bytes.

    The system's copies of files count as free if they can be reclaimed. On systems other than
    Linux, half of the main memory is assumed to be free.
    """
    size = main_memory()
    free = size // 2
    with suppress(OSError, ValueError, KeyError):
        free = min(size, 1024 * _number(MEMORY, "MemAvailable:"))
    with suppress(OSError, ValueError, KeyError):
        used = int((CONTAINER / "memory.current").read_text(encoding="ascii"))
        free = min(free, size - used + _number(CONTAINER / "memory.stat", "inactive_file"))
    return max(free, 0)


def process_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _number(file: Path, name: str) -> int:
    """Return the number after a name at the beginning of a line."""
    lines = file.read_text(encoding="ascii").splitlines()
    return int({name: number for name, number, *_ in map(str.split, lines)}[name])

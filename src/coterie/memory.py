"""The size of this machine's main memory."""

import os
from contextlib import suppress
from pathlib import Path

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The file with a container's memory limit: a number of bytes, or `max`."""


def main_memory() -> int:
    """Return this machine's main memory in bytes, or its container's limit if that is lower."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        size = min(size, int(CONTAINER_LIMIT.read_text(encoding="ascii")))
    return size

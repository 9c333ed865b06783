"""Free ports, and processes that end with their parent."""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable

SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


def free_port() -> int:
    """Return an unused port on loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def die_with_parent() -> Callable[[], None] | None:
    """Return the first action of a child process: ask Linux for SIGTERM when its parent ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here, because little is safe between fork and exec
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)

    return ask

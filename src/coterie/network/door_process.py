"""The door (door.py) as a child of the server's process, and what must stop with that process."""

import ctypes
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.errors import CoterieError
from coterie.network.door import Settings
from coterie.network.keys import Keys

BACKLOG = 1024
STOP_SECONDS = 5
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class DoorProcess:
    """Listens from the time it is made, and lets clients in from `with` to the end of its block.

    It ends with this process, even if that is killed: its standard input then ends.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        """Raises CoterieError if the address or the keys cannot be used."""
        self.settings = settings
        keys = Keys(Path(settings.keys))
        keys.door(keys.clients().values())
        self.listening = listen(address)

    def __enter__(self) -> Self:
        """Start the program."""
        number = self.listening.fileno()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "coterie.network.door"),
                *(str(number), json.dumps(asdict(self.settings))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is for this process, which then stops it
        )
        self.listening.close()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every connection."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    @property
    def alive(self) -> bool:
        """Whether the program runs."""
        return self.process.poll() is None

    def ordered(self, name: str) -> None:
        """Tell it that a client is about to get an order, so that its reply may come in."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `alive` tells
            self.process.stdin.write(f"{name}\n".encode())
            self.process.stdin.flush()


def listen(address: str) -> socket.socket:
    """A socket that listens on an address such as 0.0.0.0:9092 or [::]:9092.

    Raises CoterieError if it is no such address, or is taken or not this machine's.
    """
    host, _, port = address.rpartition(":")
    inner = host.removeprefix("[").removesuffix("]")
    try:
        version = ip_address(inner).version
        valid = host == (inner if version == 4 else f"[{inner}]")
    except ValueError:
        version, valid = 0, False
    if not valid or "%" in host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise CoterieError(
            "--address takes an IP address and a port, such as 0.0.0.0:9092 or [::]:9092, "
            f"not {address!r}."
        )
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        return socket.create_server((inner, int(port)), family=family, backlog=BACKLOG)
    except OSError as error:
        raise CoterieError(f"Could not listen on {address}: {_reason(error, port)}.") from None


def _reason(error: OSError, port: str) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"another program uses port {port}, perhaps a server that still runs; stop it, or "
                "choose another port"
            )
        case errno.EADDRNOTAVAIL:
            return "this machine does not have that address; 0.0.0.0 stands for all that it has"
        case errno.EACCES:
            return "this needs more rights; choose a port above 1023"
        case _:
            return os.strerror(error.errno) if error.errno else str(error)


def die_with_parent() -> Callable[[], None] | None:
    """What a child process does first: ask Linux for SIGTERM when the process that made it ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # loaded here, because little is safe between fork and exec
    parent = os.getpid()

    def ask() -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)

    return ask

"""A TCP proxy whose connections break, stall and change bytes."""

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from contextlib import suppress
from typing import Literal, Self

PIECE = 1 << 16
Fault = Literal["reset", "close", "stall", "corrupt"]


class LossyProxy:
    """A proxy on loopback, which forwards connections to a port in both directions.

    Args:
        target: The port to which connections are forwarded.
        fault: What happens to a connection after `limit` bytes. `reset` discards bytes in transit,
            `close` truncates, `stall` forwards nothing more, `corrupt` changes a byte.
        limit: The number of bytes, in both directions together; None: there are no faults.
        delay: The time by which each piece is delayed, in seconds.
        rate: The maximum rate of each connection, in bytes per second; None: no maximum.
        every: The interval at which all connections break (`reset` or `close`), in seconds; None:
            connections break only because of `limit`.
        port: The proxy's port; 0: any.
    """

    def __init__(
        self,
        target: int,
        fault: Fault = "reset",
        limit: int | None = None,
        delay: float = 0,
        rate: float | None = None,
        every: float | None = None,
        port: int = 0,
    ) -> None:
        self.target, self.fault, self.limit, self.delay = target, fault, limit, delay
        self.rate, self.every, self.started = rate, every, time.monotonic()
        self.lock = threading.Lock()
        self.accepted = 0
        """Number of connections."""
        self.faults = 0
        """Number of faults."""
        self.interruptions: set[int] = set()
        """The intervals at whose end at least one connection broke."""
        self.carried = 0
        """Number of bytes that have reached the proxy, including those that it has discarded."""
        self.listening = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port = self.listening.getsockname()[1]
        self.address = f"localhost:{self.port}"
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        """Start to accept connections."""
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all connections."""
        for each in (self.listening, *self.sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                far = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self.sockets += near, far
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    @property
    def interval(self) -> int:
        """The number of times that `every` seconds have passed."""
        return 0 if self.every is None else int((time.monotonic() - self.started) / self.every)

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        """Forward a connection in both directions until it ends."""
        count, sinks, interval = 0, {near: far, far: near}, self.interval
        with near, far, suppress(OSError):
            while True:
                readable = select.select([near, far], [], [], None if self.every is None else 0.1)
                if self.interval > interval:
                    self._interrupt(interval, near, far)
                for source in readable[0]:
                    if not (piece := source.recv(PIECE)):
                        return
                    time.sleep(self.delay + (len(piece) / self.rate if self.rate else 0))
                    before, count = count, count + len(piece)
                    with self.lock:
                        self.carried += len(piece)
                    if self.limit is None or count < self.limit:
                        sinks[source].sendall(piece)
                    else:
                        self.faults += before < self.limit
                        piece = self._damaged(piece, max(0, self.limit - before), near, far)
                        sinks[source].sendall(piece)

    def _interrupt(self, interval: int, *ends: socket.socket) -> None:
        """Close a connection at the end of an interval; always raise OSError."""
        unread = sum(_unread(end) for end in ends)
        with self.lock:
            self.faults += 1
            self.interruptions.add(interval)
            self.carried += unread
        self._damaged(b"", 0, *ends)

    def _damaged(self, piece: bytes, place: int, *ends: socket.socket) -> bytes:
        """Return a piece after the proxy's fault; raise OSError if the connection breaks.

        Args:
            piece: The bytes.
            place: The number of bytes before the fault.
            ends: The sockets of the connection.
        """
        match self.fault:
            case "reset":
                for end in ends:  # the rest in the kernel's buffers is discarded
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raise ConnectionResetError
            case "close":
                raise ConnectionAbortedError
            case "stall":
                return piece[:place]
            case _:
                return piece if not place else piece[:-1] + bytes([piece[-1] ^ 1])


def _unread(end: socket.socket) -> int:
    """Return the number of bytes in a socket's receive buffer."""
    (count,) = struct.unpack("i", fcntl.ioctl(end, termios.FIONREAD, bytes(4)))
    return count

"""Listeners that limit their pending and admitted connections.

A connection is pending until it has proved that it belongs to a caller with access. Pending
connections are few and short-lived, so that strangers cannot use up the file descriptors.
"""

import asyncio
import itertools
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Generic, TypeVar

PENDING = 512
"""The maximum number of pending connections.

When the limit is reached, the oldest pending connection of the source with the most pending
connections is closed. A flood from one address therefore does not affect callers at other
addresses.
"""
PENDING_SECONDS = 10.0
"""The time after which a pending connection is closed."""
IDLE_SECONDS = 60.0
"""The time without a request after which an admitted connection is closed."""
ADMITTED = 256
"""The maximum number of admitted connections of a `PlainListener`."""

log = logging.getLogger(__name__)


@dataclass
class Connection:
    """An open connection of a caller with access."""

    requests: int = 0
    """The number of requests in progress."""
    idle_since: float = field(default_factory=time.monotonic)
    """The time on the monotonic clock at which the last request ended."""

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request as in progress during the body of the `with` statement."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            self.idle_since = time.monotonic()


@dataclass
class PlainConnection(Connection):
    """An admitted connection of a `PlainListener`."""

    source: str = field(kw_only=True)
    """The source of the connection; see `source_of`."""


C = TypeVar("C", bound=Connection)
K = TypeVar("K")


class Acceptor(ABC, Generic[C]):
    """Accepts connections on a socket. A subclass decides which connections are admitted.

    Args:
        listening: The listening socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        listening.setblocking(False)
        self.connections: dict[asyncio.BaseTransport, C] = {}
        """The admitted connections."""
        self.pending: dict[asyncio.Task[None], str] = {}
        """The sources of the pending connections, oldest first."""

    @abstractmethod
    async def admit(
        self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, source: str
    ) -> None:
        """Add a new connection to `connections`, or close it.

        The connection is pending until this coroutine ends. If it is cancelled, it closes the
        connection.

        Args:
            protocol: A function that returns the asyncio protocol for the connection.
            accepted: The socket of the connection.
            source: The source of the connection.
        """

    def each_second(self, second: int) -> None:
        """Perform regular work, such as reading keys; called once a second.

        Args:
            second: The number of this call, counted from 1.
        """

    def close(self, transport: asyncio.BaseTransport) -> None:
        """Close a connection without sending the data that is still buffered."""
        self.connections.pop(transport, None)
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()

    async def serve(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until this coroutine is cancelled, and close pending connections.

        Args:
            protocol: A function that returns the asyncio protocol for a new connection.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._accept(protocol))
                tasks.create_task(self._sweep())
        finally:
            pending = list(self.pending)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _accept(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (address, *_) = await loop.sock_accept(self.listening)
            except OSError as error:  # no file descriptor is free, or the client disconnected
                log.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            source = source_of(address)
            if len(self.pending) >= PENDING:
                oldest = first_of_busiest(self.pending)
                del self.pending[oldest]
                oldest.cancel()
            task = asyncio.create_task(self.admit(protocol, accepted, source))
            self.pending[task] = source
            task.add_done_callback(lambda task: self.pending.pop(task, None))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are pending

    async def _sweep(self) -> None:
        """Close idle connections and forget closed connections, once a second."""
        for second in itertools.count(1):
            await asyncio.sleep(1)
            now = time.monotonic()
            for transport, connection in list(self.connections.items()):
                idle = not connection.requests and now - connection.idle_since > IDLE_SECONDS
                if idle or transport.is_closing():
                    self.close(transport)
            self.each_second(second)


class PlainListener(Acceptor[PlainConnection]):
    """Accepts connections without TLS, each of which must send a permitted request soon.

    The server calls `permit` for each request that it permits. The first permitted request admits
    its connection. If more than `ADMITTED` connections are admitted, an idle connection of the
    source with the most idle connections is closed.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening)
        self.waiting: dict[asyncio.BaseTransport, tuple[str, asyncio.Event]] = {}
        """For each pending connection, its source, and an event that `permit` sets."""

    async def admit(
        self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, source: str
    ) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(protocol, accepted)
        _, permitted = self.waiting[transport] = source, asyncio.Event()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(PENDING_SECONDS):
                    await permitted.wait()
        finally:
            del self.waiting[transport]
            if not permitted.is_set():
                self.close(transport)

    def permit(self, transport: asyncio.BaseTransport | None) -> PlainConnection | None:
        """Return the connection of a permitted request, after admitting it if it was pending.

        The result is None if the connection is closed, or if all admitted connections are busy. The
        connection then stays pending, so that the caller can be told.
        """
        if transport is None or transport not in self.waiting:
            return None if transport is None else self.connections.get(transport)
        if len(self.connections) >= ADMITTED:
            pairs = sorted(self.connections.items(), key=lambda pair: pair[1].idle_since)
            idle = {each: c.source for each, c in pairs if not c.requests}
            if not idle:
                return None
            self.close(first_of_busiest(idle))
        source, permitted = self.waiting[transport]
        permitted.set()
        connection = self.connections[transport] = PlainConnection(source=source)
        return connection


def first_of_busiest(sources: Mapping[K, str]) -> K:
    """Return the first key whose value is the most frequent value."""
    [(busiest, _)] = Counter(sources.values()).most_common(1)
    return next(key for key, source in sources.items() if source == busiest)


def source_of(address: str) -> str:
    """Return the source of connections from an IP address.

    If there are too many pending connections, one of the busiest source is closed. The source of an
    IPv4 address is the address itself. The source of an IPv6 address is its /64 network, because
    one machine can use all addresses of such a network.
    """
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        mapped = parsed.ipv4_mapped  # how a dual-stack socket represents an IPv4 address
        return str(ip_network((parsed, 64), strict=False) if mapped is None else mapped)
    return address

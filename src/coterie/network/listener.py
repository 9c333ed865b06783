"""Accepts TLS connections from clients with a registered certificate, within limits.

A TLS handshake without a registered certificate fails, so that the server never parses a request
from an unknown client.
"""

import asyncio
import hashlib
import itertools
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network

from cryptography.hazmat.primitives.hashes import SHA256

from coterie.errors import CoterieError
from coterie.network.keys import Keys

HANDSHAKES = 512
"""The maximum number of handshakes in progress.

When the limit is reached, the oldest handshake of the address with the most handshakes is aborted.
A flood from one address therefore does not affect clients at other addresses.
"""
HANDSHAKE_SECONDS = 10.0
"""The time after which a handshake is aborted."""
FAILURES_PER_SECOND = 20
"""The maximum number of failed handshakes per second and address.

When the limit is reached, further connections from the address wait for the next second.
"""
CONNECTIONS = 16
"""The maximum number of open connections of one client."""
IDLE_SECONDS = 60.0
"""The time without a request after which a connection is closed."""
LOGGED_REFUSALS = 3
"""The number of refused handshakes per address and minute that are logged individually."""
REPORT_SECONDS = 60
"""The interval at which the total numbers of refused handshakes are logged."""

UNREGISTERED = (18, 19, 20, 21)
"""OpenSSL's error codes for a certificate that is neither in the trust store nor signed by a
certificate in the trust store."""

log = logging.getLogger(__name__)


@dataclass
class Connection:
    """An open connection of a client."""

    client: str
    certificate: bytes
    """The SHA-256 of the client's certificate (DER)."""
    session: str = ""
    """The session of the most recent request."""
    requests: int = 0
    """The number of requests in progress."""
    idle_since: float = field(default_factory=time.monotonic)
    """The time on the monotonic clock at which the last request ended."""


class Listener:
    """Accepts connections on a socket, and identifies the client of each connection.

    Args:
        keys: The server's key folder. Changes of its files take effect within a second.
        listening: The listening socket.

    Raises:
        CoterieError: The keys cannot be used.
    """

    def __init__(self, keys: Keys, listening: socket.socket) -> None:
        self.keys, self.listening = keys, listening
        listening.setblocking(False)
        self.connections: dict[asyncio.BaseTransport, Connection] = {}
        self.handshakes: dict[asyncio.Task[None], str] = {}
        """The addresses of the handshakes in progress, oldest first."""
        self.failures: Counter[str] = Counter()
        """The number of handshakes that failed in the current second, by address."""
        self.refusals: Counter[str] = Counter()
        """The number of handshakes that failed in the current minute, by address."""
        self.keys_state: object = None
        """The state of the key folder when the keys were last read."""
        self.fault = ""
        """An error message that says why the keys could not be read, or an empty string."""
        self.faults = keys.read_clients()[1]
        """Sentences about unusable certificates of clients, which have already been logged."""
        self.registered: dict[bytes, str] = {}
        """The clients' names, by the SHA-256 of their certificates (DER)."""
        self.read_keys()

    def read_keys(self) -> None:
        """Read the keys if they have changed, and close connections whose certificate was removed.

        Raises:
            CoterieError: The server's certificate cannot be used. Removed clients are disconnected
                even in this case.
        """
        if (state := self.keys.state()) == self.keys_state:
            return
        clients, faults = self.keys.read_clients()
        self.registered = {c.certificate.fingerprint(SHA256()): c.name for c in clients.values()}
        for transport, connection in list(self.connections.items()):
            if connection.certificate not in self.registered:
                log.info("%s: the key is no longer accepted", connection.client)
                self.close(transport)
        for fault in faults:
            if fault not in self.faults:
                log.warning(fault)
        self.faults = faults
        self.context = self.keys.server_context(clients.values())
        self.keys_state = state

    def close(self, transport: asyncio.BaseTransport) -> None:
        """Close a connection without sending the data that is still buffered."""
        self.connections.pop(transport, None)
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()

    async def serve(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections until this coroutine is cancelled.

        Args:
            protocol: A function that returns the asyncio protocol for a new connection.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._accept(protocol))
            tasks.create_task(self._sweep())

    async def _accept(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, (address, *_) = await loop.sock_accept(self.listening)
            except OSError as error:  # no file descriptor is free, or the client disconnected
                log.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            host = source_of(address)
            if len(self.handshakes) >= HANDSHAKES:
                [(busiest, _)] = Counter(self.handshakes.values()).most_common(1)
                oldest = next(task for task, source in self.handshakes.items() if source == busiest)
                del self.handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._shake_hands(protocol, accepted, host))
            self.handshakes[task] = host
            task.add_done_callback(lambda task: self.handshakes.pop(task, None))
            await asyncio.sleep(0)  # sock_accept does not yield while connections are pending

    async def _shake_hands(
        self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, host: str
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.failures[host] >= FAILURES_PER_SECOND:
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            accepted.close()
            raise
        try:
            transport, _ = await loop.connect_accepted_socket(
                protocol, accepted, ssl=self.context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # includes ssl.SSLError and TimeoutError
            self.failures[host] += 1
            self.refusals[host] += 1
            if self.refusals[host] <= LOGGED_REFUSALS:
                log.warning("refused a connection from %s: %s", host, reason_of(error))
            error.__traceback__ = None  # part of a cycle that keeps the connection's buffers
        else:
            self.connection(transport)

    def connection(self, transport: asyncio.BaseTransport) -> Connection | None:
        """Return the connection of a transport.

        If the client's certificate was removed during the handshake, or the client has too many
        connections, the transport is closed and None is returned.
        """
        if (connection := self.connections.get(transport)) is not None:
            return connection
        encoded = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = hashlib.sha256(encoded).digest()
        client = self.registered.get(certificate)
        if client is None or len(self.connected(client)) >= CONNECTIONS:
            self.close(transport)
            return None
        connection = self.connections[transport] = Connection(client, certificate)
        return connection

    def connected(self, client: str) -> list[Connection]:
        """Return a client's open connections."""
        pairs = self.connections.items()
        return [c for transport, c in pairs if c.client == client and not transport.is_closing()]

    async def _sweep(self) -> None:
        """Close idle connections, forget closed connections, and read the keys, once a second."""
        for second in itertools.count(1):
            await asyncio.sleep(1)
            self.failures.clear()
            now = time.monotonic()
            for transport, connection in list(self.connections.items()):
                idle = not connection.requests and now - connection.idle_since > IDLE_SECONDS
                if idle or transport.is_closing():
                    self.close(transport)
            if second % REPORT_SECONDS == 0:
                for host, count in self.refusals.items():
                    if count > LOGGED_REFUSALS:
                        log.warning("refused %d connections from %s in a minute", count, host)
                self.refusals.clear()
            fault = ""
            try:
                self.read_keys()
            except (CoterieError, OSError) as error:  # the previous keys remain valid
                fault = str(error)
            if fault and fault != self.fault:
                log.warning("could not read the keys: %s", fault)
            self.fault = fault


def source_of(address: str) -> str:
    """Return the source of connections from an IP address.

    The limits on handshakes (`HANDSHAKES` and `FAILURES_PER_SECOND`) apply to each source. The
    source of an IPv4 address is the address itself. The source of an IPv6 address is its /64
    network, because one machine can use all addresses of such a network.
    """
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        mapped = parsed.ipv4_mapped  # how a dual-stack socket represents an IPv4 address
        return str(ip_network((parsed, 64), strict=False) if mapped is None else mapped)
    return address


def reason_of(error: OSError) -> str:
    """Return the reason why a TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in UNREGISTERED:
            return "the certificate is not registered; the client was removed, or has an old key"
        return f"certificate refused ({error.verify_message})"
    reason = getattr(error, "reason", None) or str(error) or "connection closed"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "no client certificate"
    return str(reason).replace("_", " ").lower()

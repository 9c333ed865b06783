"""Accepts TLS connections from clients with a registered certificate, within limits.

A TLS handshake without a registered certificate fails, so that the server never parses a request
from an unknown client.
"""

import asyncio
import hashlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.hashes import SHA256

from coterie.errors import CoterieError
from coterie.network.accepting import PENDING_SECONDS, Acceptor, Connection
from coterie.network.keys import Keys

FAILURES_PER_SECOND = 20
"""The maximum number of failed handshakes per second and address.

When the limit is reached, further connections from the address wait for the next second.
"""
CONNECTIONS = 16
"""The maximum number of open connections of one client."""
LOGGED_REFUSALS = 3
"""The number of refused handshakes per address and minute that are logged individually."""
REPORT_SECONDS = 60
"""The interval at which the total numbers of refused handshakes are logged."""

UNREGISTERED = (18, 19, 20, 21)
"""OpenSSL's error codes for a certificate that is neither in the trust store nor signed by a
certificate in the trust store."""

log = logging.getLogger(__name__)


@dataclass
class ClientConnection(Connection):
    """An open connection of a client."""

    client: str = field(kw_only=True)
    certificate: bytes = field(kw_only=True)
    """The SHA-256 of the client's certificate (DER)."""
    session: str = ""
    """The session of the most recent request."""


class Listener(Acceptor[ClientConnection]):
    """Accepts connections on a socket, and identifies the client of each connection.

    A connection is pending during its TLS handshake.

    Args:
        keys: The server's key folder. Changes of its files take effect within a second.
        listening: The listening socket.

    Raises:
        CoterieError: The keys cannot be used.
    """

    def __init__(self, keys: Keys, listening: socket.socket) -> None:
        super().__init__(listening)
        self.keys = keys
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

    async def admit(
        self, protocol: Callable[[], asyncio.Protocol], accepted: socket.socket, source: str
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self.failures[source] >= FAILURES_PER_SECOND:
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            accepted.close()
            raise
        try:
            transport, _ = await loop.connect_accepted_socket(
                protocol, accepted, ssl=self.context, ssl_handshake_timeout=PENDING_SECONDS
            )
        except OSError as error:  # includes ssl.SSLError and TimeoutError
            self.failures[source] += 1
            self.refusals[source] += 1
            if self.refusals[source] <= LOGGED_REFUSALS:
                log.warning("refused a connection from %s: %s", source, reason_of(error))
            error.__traceback__ = None  # part of a cycle that keeps the connection's buffers
        else:
            self.connection(transport)

    def connection(self, transport: asyncio.BaseTransport) -> ClientConnection | None:
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
        connection = ClientConnection(client=client, certificate=certificate)
        self.connections[transport] = connection
        return connection

    def connected(self, client: str) -> list[ClientConnection]:
        """Return a client's open connections."""
        pairs = self.connections.items()
        return [c for transport, c in pairs if c.client == client and not transport.is_closing()]

    def each_second(self, second: int) -> None:
        self.failures.clear()
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

"""The door to the network: a program that lets clients with a registered certificate in.

A SuperLink serves three interfaces on one port, and two of them let whoever reaches them start
code; it also holds in memory whatever it is sent. It therefore listens on loopback, and this
program, which door_process.py starts beside it, passes clients' calls on to it.

Whoever has no registered certificate is turned away in the TLS handshake, so that nothing a
stranger sends is parsed. Of what a client asks, the calls in `CALLS` pass, in the name of its
certificate's key, streamed, and within the limits below.
"""

import asyncio
import hashlib
import itertools
import json
import logging
import socket
import ssl
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web
from cryptography.hazmat.primitives.hashes import SHA256

from coterie.errors import CoterieError
from coterie.files import LogFile
from coterie.network.keys import Keys, Registered

CALLS = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat", "confirm-message-received"),
        *("pull-messages", "push-messages", "pull-object", "push-object"),
    )
)
"""What clients ask of a SuperLink. They fetch no code, and are registered on the server."""
KEEPS = frozenset({"/v1/fleet/push-messages", "/v1/fleet/push-object"})
"""The calls of which a SuperLink keeps the bytes; others have no more than `SMALL`."""
PASSED = (
    *("content-type", "accept", "flwr-signature", "flwr-timestamp", "flwr-package-name"),
    *("flwr-package-version", "flwr-component-name"),
)
"""The headers that Flower's clients speak in. Nobody can pass for another host by sending more."""
HANDSHAKES, HANDSHAKES_EACH = 512, 256
"""Handshakes under way at once, in all and from one address. In all, the oldest gives way."""
REFUSALS = 100
"""Failed handshakes from an address in a minute, until the rest of that minute is not for it."""
CONNECTIONS = 64
"""Of one client, at once."""
AT_ONCE = 4
"""Requests of one client that the SuperLink works on at once; others wait."""
RATE, BURST = 200.0, 1000.0
"""Requests of one client: per second, and at once after a pause; others wait."""
HANDSHAKE_SECONDS, IDLE_SECONDS, STALL_SECONDS, REQUEST_SECONDS = 10.0, 60.0, 30.0, 900.0
"""Until a handshake is given up; a connection without a whole request; a body that does not go on,
in either direction; and a request in all."""
SMALL = 1 << 16
"""Bytes of a body up to which it is passed on in one piece."""

T = TypeVar("T")

log = logging.getLogger("coterie.door")
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""aiohttp's, which would log what could not be parsed."""


@dataclass(frozen=True)
class Settings:
    """What the door is told when it starts."""

    keys: str
    """The server's folder of keys."""
    superlink: int
    """The SuperLink's port on 127.0.0.1."""
    authority: str
    """The file of the certificate authority that the SuperLink's own certificate is from."""
    request_bytes: int
    """Of one request of those in `KEEPS`, at most."""
    order_bytes: int
    """Of all that a client leaves with the SuperLink until it gets its next order, at most."""
    log: str


@dataclass
class Visitor:
    """A client, and what it may do next."""

    name: str
    left: int
    """Bytes that it may push until its next order."""
    tokens: float = BURST
    refilled: float = field(default_factory=time.monotonic)
    working: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def turn(self) -> None:
        """Wait until the rate allows one more request."""
        while True:
            now = time.monotonic()
            self.tokens = min(BURST, self.tokens + RATE * (now - self.refilled))
            self.refilled = now
            if self.tokens >= 1:
                self.tokens -= 1
                return
            await asyncio.sleep((1 - self.tokens) / RATE)


@dataclass
class Connection:
    """A client's connection, with the certificate that it showed."""

    visitor: Visitor
    certificate: bytes
    """Its SHA-256."""
    key: str
    """Its public key, as Flower's header has it."""
    idle: float | None = field(default_factory=time.monotonic)
    """Since when no request is under way; None while one is."""


class Door:
    """Accepts, checks and passes on, until it is cancelled."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keys = Keys(Path(settings.keys))
        self.visitors: dict[str, Visitor] = {}
        self.registered: dict[bytes, Registered] = {}
        """By the SHA-256 of their certificates (DER)."""
        self.connections: dict[asyncio.Transport, Connection] = {}
        self.handshakes: dict[asyncio.Task[None], str] = {}
        """Those under way, oldest first, with their addresses."""
        self.refusals: Counter[str] = Counter()
        self.read: object = None
        """The state of the folder of keys when it was read."""
        self.look()

    def look(self) -> None:
        """Read the keys again if they have changed, and hang up on clients that were removed."""
        if (found := self.keys.state()) == self.read:
            return
        clients = self.keys.clients().values()
        self.context = self.keys.door(clients)
        self.registered = {client.certificate.fingerprint(SHA256()): client for client in clients}
        self.read = found
        for transport, connection in list(self.connections.items()):
            if connection.certificate not in self.registered:
                log.info("%s: its certificate is no longer accepted", connection.visitor.name)
                transport.abort()

    def ordered(self, name: str) -> None:
        """A client was sent an order, and may push a reply."""
        if name in self.visitors:
            self.visitors[name].left = self.settings.order_bytes

    async def serve(self, listening: socket.socket) -> None:
        """Take connections."""
        listening.setblocking(False)
        trusted = ssl.create_default_context(cafile=self.settings.authority)
        connector = aiohttp.TCPConnector(limit=0, ssl=trusted, keepalive_timeout=3)
        async with aiohttp.ClientSession(
            f"https://localhost:{self.settings.superlink}",
            connector=connector,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=60),
        ) as self.superlink:
            self.server = web.Server(
                self.pass_on,
                handler_cancellation=True,
                access_log=None,
                auto_decompress=False,
                lingering_time=5,
                logger=SILENT,
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.accept(listening))
                tasks.create_task(self.sweep())

    async def accept(self, listening: socket.socket) -> None:
        """Begin handshakes, as many as the limits allow."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                plain, (host, *_) = await loop.sock_accept(listening)
            except OSError as error:  # no file descriptor is left, or the caller has gone
                log.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            here = sum(other == host for other in self.handshakes.values())
            if self.refusals[host] >= REFUSALS or here >= HANDSHAKES_EACH:
                plain.close()
                continue
            if len(self.handshakes) >= HANDSHAKES:
                oldest = next(iter(self.handshakes))
                del self.handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self.shake_hands(plain, host))
            self.handshakes[task] = host
            task.add_done_callback(lambda done: self.handshakes.pop(done, None))
            await asyncio.sleep(0)  # sock_accept does not wait where others are waiting

    async def shake_hands(self, plain: socket.socket, host: str) -> None:
        """TLS with both certificates; then requests are taken."""
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(
                self.server, plain, ssl=self.context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are such
            self.refusals[host] += 1
            if self.refusals[host] <= REFUSALS:
                why = getattr(error, "reason", None) or type(error).__name__
                log.info("%s: turned away: %s", host, why)
            return
        self.enter(transport)

    def enter(self, transport: asyncio.Transport) -> Connection | None:
        """The client's connection, noted once; None, and cut, for one that may not be."""
        if transport in self.connections:
            return self.connections[transport]
        shown = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        certificate = hashlib.sha256(shown).digest()
        client = self.registered.get(certificate)  # not, if it was removed meanwhile
        if client is None or self.count(client.name) >= CONNECTIONS:
            transport.abort()
            return None
        if client.name not in self.visitors:
            self.visitors[client.name] = Visitor(client.name, self.settings.order_bytes)
        visitor = self.visitors[client.name]
        if not self.count(client.name):
            log.info("%s: connected from %s", client.name, transport.get_extra_info("peername")[0])
        key = b64encode(client.public).decode()
        found = self.connections[transport] = Connection(visitor, certificate, key)
        return found

    def count(self, name: str) -> int:
        """Open connections of a client."""
        return sum(
            connection.visitor.name == name and not transport.is_closing()
            for transport, connection in self.connections.items()
        )

    async def sweep(self) -> None:
        """Each second: forget connections that ended, cut idle ones, look at the keys."""
        for second in itertools.count(1):
            await asyncio.sleep(1)
            for transport, connection in list(self.connections.items()):
                if transport.is_closing():
                    del self.connections[transport]
                    if all(c.visitor is not connection.visitor for c in self.connections.values()):
                        log.info("%s: disconnected", connection.visitor.name)
                elif connection.idle and time.monotonic() - connection.idle > IDLE_SECONDS:
                    transport.abort()
            if second % 60 == 0:
                self.refusals.clear()
            try:
                self.look()
            except (CoterieError, OSError) as error:  # until it can be read, the old ones hold
                log.warning("could not read the keys: %s", error)

    async def pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        """A request's answer, the SuperLink's or a refusal."""
        transport = request.transport
        if transport is None or (connection := self.enter(transport)) is None:
            return refusal(403)
        connection.idle = None
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await self.answer(request, connection)
        except TimeoutError:
            why = 408
        except aiohttp.ClientError as error:
            log.warning("%s: the SuperLink did not answer: %s", connection.visitor.name, error)
            why = 502
        except Exception:
            log.exception("%s: an error in the door", connection.visitor.name)
            why = 500
        finally:
            connection.idle = time.monotonic()
        return refusal(why)

    async def answer(self, request: web.BaseRequest, connection: Connection) -> web.StreamResponse:
        """The SuperLink's answer, as it comes; TimeoutError or aiohttp.ClientError if it fails."""
        visitor, call = connection.visitor, request.raw_path
        if (why := self.objection(request, visitor)) is not None:
            log.warning("%s: refused with %d: %.100r", visitor.name, why, call)
            return refusal(why)
        length = request.content_length or 0
        if call in KEEPS:  # at once, or others that wait beside it would not know
            visitor.left -= length
        await visitor.turn()
        async with visitor.working:
            headers = {name: request.headers[name] for name in PASSED if name in request.headers}
            headers |= {"flwr-public-key": connection.key, "content-length": str(length)}
            body = await within(request.read()) if length <= SMALL else pieces(request)
            async with self.superlink.post(call, data=body, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                response.content_length = answer.content_length
                await response.prepare(request)
                try:
                    async for piece in answer.content.iter_any():
                        await within(response.write(piece))
                    await within(response.write_eof())
                except BaseException:  # half an answer is none, whoever ended it
                    if request.transport is not None:
                        request.transport.abort()
                    raise
                return response

    def objection(self, request: web.BaseRequest, visitor: Visitor) -> int | None:
        """The status with which a request is refused, if it is."""
        if request.method != "POST" or request.raw_path not in CALLS:  # as it was sent
            return 404
        if request.content_length is None:
            return 411
        if "content-encoding" in request.headers:
            return 415
        keeps = request.raw_path in KEEPS
        if request.content_length > (self.settings.request_bytes if keeps else SMALL):
            return 413
        if keeps and request.content_length > visitor.left:
            return 429
        return None


async def pieces(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """A body, as it comes."""
    while piece := await within(request.content.readany()):
        yield piece


async def within(step: Awaitable[T]) -> T:
    """What a step of a body gives, unless it stalls: TimeoutError."""
    async with asyncio.timeout(STALL_SECONDS):
        return await step


def refusal(status: int) -> web.Response:
    """An empty answer, after which the connection ends."""
    response = web.Response(status=status)
    response.force_close()
    return response


async def run(door: Door, listening: socket.socket) -> None:
    """Serve until whoever started this ends; each line of standard input names a client that was
    sent an order."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    serving = asyncio.create_task(door.serve(listening))
    while line := await lines.readline():
        door.ordered(line.decode().rstrip("\n"))
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


def main() -> None:
    """Arguments: the number of a listening socket that was inherited, and the settings in JSON."""
    settings = Settings(**json.loads(sys.argv[2]))
    handler = LogFile(Path(settings.log))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    asyncio.run(run(Door(settings), socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()

"""The HTTPS server of a mailbox. `protocol.py` describes the requests."""

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self, TypeVar

from aiohttp import web
from pydantic import BaseModel

from coterie.files import open_file
from coterie.network.keys import Keys
from coterie.network.listener import Listener
from coterie.network.mailbox import Inbox, Mailbox
from coterie.network.order_files import Order
from coterie.network.protocol import (
    DIGEST,
    PIECE,
    POLL_SECONDS,
    PROTOCOL,
    SESSION,
    STALL_SECONDS,
    VERSION,
    Progress,
)

STOP_SECONDS = 5.0
"""The maximum time to wait for the thread when the server stops."""
WARN_SECONDS = 60.0
"""The minimum time between two warnings about the same client and event."""
CONCURRENT_REQUESTS = 4
"""The maximum number of requests of one client that are processed concurrently.

Further requests wait.
"""
RATE, BURST = 200.0, 1000.0
"""The rate (requests per second) and the capacity of the token bucket that limits each client."""
SESSION_PATTERN = re.compile("[0-9a-f]{32}")
CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,15})-([0-9]{1,15})/([0-9]{1,15})")
"""A `Content-Range` header: the first byte, the last byte, and the total number of bytes."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)
SILENT = logging.Logger("silent", logging.CRITICAL + 1)
"""A logger without output for aiohttp, which would otherwise log every invalid request."""


@dataclass(eq=False)
class Limits:
    """The state of the limits on one client's requests."""

    processing: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(CONCURRENT_REQUESTS)
    )
    tokens: float = BURST
    """The number of requests that are permitted now."""
    refilled: float = field(default_factory=time.monotonic)
    """The time on the monotonic clock at which `tokens` was last updated."""
    upload: asyncio.Task[object] | None = None
    """The request that uploads a reply, if there is one."""

    async def take_turn(self) -> None:
        """Wait until the rate limit permits another request."""
        while True:
            now = time.monotonic()
            self.tokens = min(BURST, self.tokens + RATE * (now - self.refilled))
            self.refilled = now
            if self.tokens >= 1:
                self.tokens -= 1
                return
            await asyncio.sleep((1 - self.tokens) / RATE)

    async def stop_upload(self) -> None:
        """Cancel the client's earlier upload, the connection of which may be broken."""
        while (upload := self.upload) is not None:
            upload.cancel()
            await asyncio.wait([upload])


INBOX = web.RequestKey("inbox", Inbox)


class MailboxServer:
    """The HTTPS server of a mailbox.

    The object is a context manager. Inside the `with` block, the server runs in a separate thread.

    Args:
        mailbox: The orders and replies.
        keys: The keys of the server and the clients.
        listening: The listening socket, which the server closes when it stops.
        largest: The maximum size of a reply in bytes.

    Raises:
        CoterieError: The keys cannot be used.
    """

    def __init__(
        self, mailbox: Mailbox, keys: Keys, listening: socket.socket, largest: int
    ) -> None:
        self.mailbox, self.largest = mailbox, largest
        self.listener = Listener(keys, listening)
        self.limits: dict[str, Limits] = {}
        self.warned: dict[tuple[str, str], float] = {}
        """The time on the monotonic clock of the last warning, by client and event."""
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._run, name="mailbox", daemon=True)

    def __enter__(self) -> Self:
        """Start the server."""
        self.thread.start()
        self.started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server and close all connections."""
        if (loop := self.mailbox.loop) is not None:
            with suppress(RuntimeError):  # the loop has closed meanwhile
                loop.call_soon_threadsafe(self.serving.cancel)
        self.thread.join(STOP_SECONDS)
        self.listener.listening.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            log.exception("the network stopped")
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.mailbox.failure = error
        finally:
            self.mailbox.loop = None
            self.started.set()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving = task
        ticket = "{ticket:[0-9a-f]{32}}"
        application = web.Application(middlewares=[self._admit])
        application.add_routes(
            [
                web.get("/order", self._wait_for_order, allow_head=False),
                web.get(f"/orders/{ticket}", self._send_order, allow_head=False),
                web.delete(f"/orders/{ticket}", self._decline_order),
                web.get(f"/replies/{ticket}", self._report_progress, allow_head=False),
                web.put(f"/replies/{ticket}", self._receive_reply),
                web.post("/session", self._keep_session),
                web.delete("/session", self._end_session),
            ]
        )
        runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            logger=SILENT,
            auto_decompress=False,
            lingering_time=5,
            shutdown_timeout=1,
        )
        await runner.setup()
        assert runner.server is not None
        self.mailbox.loop = asyncio.get_running_loop()
        self.started.set()
        try:
            await self.listener.serve(runner.server)
        finally:
            await runner.cleanup()

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check a request's client, protocol version and session, and call the request's handler.

        Before the call, the request waits until the client's rate limit and the limit on concurrent
        requests permit it. If a check fails, the handler is not called, and an error response is
        returned.
        """
        transport, session = request.transport, request.headers.get(SESSION, "")
        if transport is None or (connection := self.listener.connection(transport)) is None:
            return empty_response(403)
        name = connection.client
        if request.headers.get(PROTOCOL) != VERSION or not SESSION_PATTERN.fullmatch(session):
            self._warn(name, f"refused a version of the protocol other than {VERSION}")
            return empty_response(426)
        sessions = {each.session for each in self.listener.connected(name)}
        if (inbox := self.mailbox.enter(name, session, sessions)) is None:
            return empty_response(409)
        connection.session, request[INBOX] = session, inbox
        limits = self.limits.setdefault(name, Limits())
        try:
            with connection.request():
                await limits.take_turn()
                async with limits.processing:
                    return await handler(request)
        except TimeoutError:
            return empty_response(408)
        except OSError as error:
            self._warn(name, f"could not store the reply: {error.strerror or error}")
            return empty_response(507)

    async def _wait_for_order(self, request: web.Request) -> web.StreamResponse:
        inbox, session = request[INBOX], request.headers[SESSION]
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                while inbox.order is None and inbox.session == session:
                    inbox.changed.clear()
                    await inbox.changed.wait()
        if (order := inbox.order) is None or inbox.session != session:
            return empty_response(204)
        return json_response(order.offer)

    async def _send_order(self, request: web.Request) -> web.StreamResponse:
        if (order := order_of(request)) is None:
            return empty_response(410)
        size, start = order.offer.size, 0
        with suppress(ValueError):
            start = request.http_range.start or 0
        if not 0 <= start <= size:
            return empty_response(416)
        response = web.StreamResponse(status=200 if start == 0 else 206)
        response.content_length = size - start
        try:
            file = open_file(order.path)
        except OSError as error:
            return self._report_unreadable(request[INBOX], order, error)
        with file:
            try:
                file.seek(start)
                await response.prepare(request)
                while piece := file.read(PIECE):
                    await with_timeout(response.write(piece))
                    self.mailbox.note(request[INBOX])
                await with_timeout(response.write_eof())
                order.downloaded = True
            except OSError:  # the client would read an error response as part of the order
                if request.transport is not None:
                    self.listener.close(request.transport)
        return response

    def _report_unreadable(self, inbox: Inbox, order: Order, error: OSError) -> web.Response:
        """Return the response about an order whose file cannot be opened.

        A file is missing for one of two reasons: the order has been withdrawn in the meantime, or
        another process has deleted the file. In the second case, this method withdraws the order,
        so that the server's round loop sends a new order to the client.
        """
        if isinstance(error, FileNotFoundError):
            self.mailbox.decline(inbox, order)
            return empty_response(410)
        self._warn(inbox.client, f"could not read the order: {error.strerror or error}")
        return empty_response(500)

    async def _decline_order(self, request: web.Request) -> web.StreamResponse:
        if (order := order_of(request)) is not None:
            self.mailbox.decline(request[INBOX], order)
        return empty_response(204)

    async def _report_progress(self, request: web.Request) -> web.StreamResponse:
        if (order := order_of(request)) is None:
            return empty_response(410)
        await self._limits(request).stop_upload()
        return json_response(Progress(received=order.received))

    async def _receive_reply(self, request: web.Request) -> web.StreamResponse:
        inbox, limits = request[INBOX], self._limits(request)
        await limits.stop_upload()
        if (order := order_of(request)) is None:
            return empty_response(410)
        content_range = CONTENT_RANGE.fullmatch(request.headers.get("Content-Range", ""))
        if content_range is None or "Content-Encoding" in request.headers:
            return empty_response(400)
        first, last, total = map(int, content_range.groups())
        if total > self.largest:
            limit = self.largest
            log.warning(
                "%s: refused a reply of %d bytes; the limit is %d", inbox.client, total, limit
            )
            self.mailbox.decline(inbox, order)
            return empty_response(413)
        if first != order.received:
            return empty_response(416)
        if last != total - 1 or request.content_length != total - first:
            return empty_response(400)
        limits.upload = asyncio.current_task()
        try:
            while piece := await with_timeout(request.content.readany()):
                if order_of(request) is not order:
                    return empty_response(410)
                order.append(piece)
                self.mailbox.note(inbox)
        finally:
            limits.upload = None
        if order.hash.hexdigest() != request.headers.get(DIGEST):
            order.restart()
            return empty_response(422)
        self.mailbox.complete(inbox, order)
        return empty_response(204)

    async def _keep_session(self, request: web.Request) -> web.StreamResponse:
        del request  # `_admit` has recorded that the client is running
        return empty_response(204)

    async def _end_session(self, request: web.Request) -> web.StreamResponse:
        self.mailbox.leave(request[INBOX].client)
        return empty_response(204)

    def _warn(self, client: str, event: str) -> None:
        """Log a warning about a client, but the same warning at most once in `WARN_SECONDS`."""
        now = time.monotonic()
        if now - self.warned.get((client, event), float("-inf")) > WARN_SECONDS:
            log.warning("%s: %s", client, event)
            self.warned[client, event] = now

    def _limits(self, request: web.Request) -> Limits:
        return self.limits[request[INBOX].client]


def order_of(request: web.Request) -> Order | None:
    """Return the order that a request's path identifies, or None if it is no longer valid."""
    order = request[INBOX].order
    ticket = request.match_info["ticket"]
    return order if order is not None and order.offer.ticket == ticket else None


def empty_response(code: int) -> web.Response:
    """Return a response without a body. If the status is an error, the connection is closed."""
    response = web.Response(status=code)
    if code >= 400:
        response.force_close()
    return response


def json_response(model: BaseModel) -> web.Response:
    """Return a response whose body is a pydantic model, serialised as JSON."""
    return web.json_response(text=model.model_dump_json())


async def with_timeout(operation: Awaitable[T]) -> T:
    """Wait for `operation`, which reads or writes some bytes of an order or a reply.

    Raises:
        TimeoutError: The operation takes longer than `STALL_SECONDS`.
    """
    async with asyncio.timeout(STALL_SECONDS):
        return await operation

"""The client's end of the network, which fetches orders from the mailbox and sends replies."""

import hashlib
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from coterie.errors import CoterieError
from coterie.messages import MessageError
from coterie.messages.envelope import Order, unseal
from coterie.messages.message import LARGEST_MESSAGE
from coterie.network.faults import is_refusal, reason_of
from coterie.network.keys import Credentials
from coterie.network.link import Seen, Worker
from coterie.network.protocol import (
    DIGEST,
    HEARTBEAT_SECONDS,
    PIECE,
    PROTOCOL,
    SESSION,
    STALL_SECONDS,
    VERSION,
    Offer,
    Progress,
)
from coterie.network.proxy import proxy_for

log = logging.getLogger(__name__)
CONNECT_SECONDS = 10.0
"""The time after which an attempt to connect is aborted."""
FIRST_PAUSE = 0.5
"""The time between the first two attempts to reach the server."""
LONGEST_PAUSE = 4.0
"""The maximum time between two attempts: clients reconnect to a restarted server within 5 s."""
REFUSED_SECONDS = 300.0
"""The time after which a client whose key or version the server refuses ends with an error."""
LARGEST_JSON = 1 << 12
"""The maximum size of a JSON response in bytes."""
CONNECTED = "connected"
GONE = 410
"""The status code of a response about an order that is no longer valid."""
Model = TypeVar("Model", bound=BaseModel)


class Connection:
    """A client's session with a server. The session survives interruptions of the network.

    If a method raises an error during a transfer, the next call continues the transfer.

    Args:
        server: The server's address, HOST:PORT.
        credentials: The client's name, certificate and private key.
        reached: A function that is called after each successful response.
    """

    def __init__(
        self, server: str, credentials: Credentials, reached: Callable[[], None] = lambda: None
    ) -> None:
        self.server, self.credentials, self.reached = server, credentials, reached
        self.session = secrets.token_hex(16)
        self.http: httpx.Client | None = None
        """The connections of the thread that created this object."""
        self.offer: Offer | None = None
        """The order that the client is downloading or executing."""
        self.order = bytearray()
        """The part of the order that has arrived."""
        self.reply: bytes | None = None
        """The reply to the order, while it is being sent."""
        self.is_full = False
        """Whether the server could not store the last reply that was sent."""
        self.stopped = threading.Event()

    def __enter__(self) -> Self:
        """Return this object; the first request connects."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the session, and tell the server unless the connection is already lost."""
        self.stopped.set()
        if self.http is not None:
            with suppress(httpx.HTTPError, CoterieError):
                self._request("DELETE", "/session")
        self.disconnect()

    def connect(self) -> None:
        """Read the key file again, and replace all connections by new ones.

        Raises:
            CoterieError: The key file cannot be used.
        """
        context = self.credentials.reload().context()
        self.disconnect()
        self.http = self._open(context)
        arguments = (self.http, context)
        threading.Thread(target=self._beat, args=arguments, name="heartbeat", daemon=True).start()

    def _open(self, context: ssl.SSLContext) -> httpx.Client:
        return httpx.Client(
            base_url=f"https://{self.server}",
            transport=httpx.HTTPTransport(
                verify=context,
                proxy=proxy_for(self.server),
                trust_env=False,
                limits=httpx.Limits(keepalive_expiry=None),
            ),
            headers={PROTOCOL: VERSION, SESSION: self.session, "Accept-Encoding": "identity"},
            timeout=httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    def disconnect(self) -> None:
        """Close all connections; the session remains."""
        if self.http is not None:
            self.http.close()
            self.http = None

    def serve(self, worker: Worker) -> None:
        """Execute the next order, if there is one, and send the reply.

        Raises:
            httpx.HTTPError: The server cannot be reached, or refuses a request.
            CoterieError: The key file cannot be used.
        """
        if self.reply is None:
            if (data := self.next_order()) is None:
                return
            try:
                self.reply = worker.answer(data)
            except MessageError as error:
                log.error("rejected a message from the server: %s", error)
                self.decline()
                return
        self._send_reply()

    def next_order(self) -> bytes | None:
        """Wait a limited time for an order. Return the order, or None if no order has arrived."""
        if self.offer is None:
            with self._stream("GET", "/order") as response:
                if response.status_code == 204:
                    return None
                self.offer = _parsed(response, Offer)
            self.order = bytearray()
        if self.offer.size > LARGEST_MESSAGE:
            self.decline()
            raise httpx.RemoteProtocolError("the server's order is too large")
        try:
            self._download(self.offer)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != GONE:
                raise
            self.offer = None
            return None
        data = bytes(self.order)
        self.order = bytearray()
        if hashlib.sha256(data).hexdigest() != self.offer.digest:
            self.offer = None  # the next request offers the order again
            raise httpx.RemoteProtocolError("the server's order arrived damaged")
        return data

    def decline(self) -> None:
        """Tell the server that there will be no reply to the order."""
        if self.offer is not None:
            self._request("DELETE", f"/orders/{self.offer.ticket}")
            self.offer, self.order = None, bytearray()

    def _download(self, offer: Offer) -> None:
        if len(self.order) == offer.size:
            return
        headers = {"Range": f"bytes={len(self.order)}-"}
        with self._stream("GET", f"/orders/{offer.ticket}", headers=headers) as response:
            for piece in response.iter_raw(PIECE):
                self.order += piece
                if len(self.order) > offer.size:
                    self.order = bytearray()
                    raise httpx.RemoteProtocolError("the server's order is longer than announced")
        if len(self.order) < offer.size:
            raise httpx.ReadError("the connection was closed")

    def _send_reply(self) -> None:
        assert self.offer is not None
        assert self.reply is not None
        path, total = f"/replies/{self.offer.ticket}", len(self.reply)
        try:
            with self._stream("GET", path) as response:
                start = min(_parsed(response, Progress).received, total - 1)
            headers = {
                DIGEST: hashlib.sha256(self.reply).hexdigest(),
                "Content-Length": str(total - start),
                "Content-Range": f"bytes {start}-{total - 1}/{total}",
            }
            self._request("PUT", path, headers=headers, content=_pieces(self.reply, start))
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (GONE, 413):
                raise
            log.warning("the server is no longer waiting for this client's reply")
        self.offer = self.reply = None

    def _request(self, method: str, path: str, **arguments: object) -> None:
        with self._stream(method, path, **arguments):
            pass

    @contextmanager
    def _stream(self, method: str, path: str, **arguments: Any) -> Iterator[httpx.Response]:
        """Send a request, and yield the response before its body is read.

        Raises:
            httpx.HTTPError: The server cannot be reached, or the response reports an error.
        """
        if self.http is None:
            self.connect()
        assert self.http is not None
        with self.http.stream(method, path, **arguments) as response:
            if "content-encoding" in response.headers:  # a few bytes could decompress to many
                raise httpx.DecodingError("the server's response is compressed")
            if not response.is_success:
                self.is_full = response.status_code == 507
                raise httpx.HTTPStatusError("", request=response.request, response=response)
            # A server whose disk is full still reports how many bytes of a reply have arrived.
            self.is_full = self.is_full and (method, path[:9]) == ("GET", "/replies/")
            if not self.is_full:
                self.reached()
            end_empty(response)
            yield response

    def _beat(self, http: httpx.Client, context: ssl.SSLContext) -> None:
        """Tell the server regularly that this client is running, until `http` is closed.

        This method runs in a separate thread with its own connections. Threads must not share
        connections: if one thread closes a connection while another uses it, the operating system
        may reuse the file descriptor. The second thread may then read from, write to or close an
        unrelated file or socket.
        """
        with self._open(context) as own:
            while not self.stopped.wait(HEARTBEAT_SECONDS) and self.http is http:
                with suppress(httpx.HTTPError), own.stream("POST", "/session") as response:
                    end_empty(response)


def end_empty(response: httpx.Response) -> None:
    """Close a response if it has no body (status 204), so that its connection can be reused."""
    if response.status_code == 204:
        response.read()


def _pieces(reply: bytes, start: int) -> Iterator[bytes]:
    for position in range(start, len(reply), PIECE):
        yield reply[position : position + PIECE]


def _parsed(response: httpx.Response, kind: type[Model]) -> Model:
    """Parse the JSON body of a response; raise httpx.HTTPError if it is invalid."""
    data = bytearray()
    for piece in response.iter_raw():
        data += piece
        if len(data) > LARGEST_JSON:
            raise httpx.RemoteProtocolError("the server's response is too long")
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        raise httpx.RemoteProtocolError("the server's response is not valid") from error


def first_order(server: str, credentials: Credentials, seconds: float) -> Order:
    """Wait for a server's order to join a run. Return the order; send no reply to the server.

    Args:
        server: The server's address, HOST:PORT.
        credentials: The client's name, certificate and private key.
        seconds: The time to wait for the order.

    Raises:
        CoterieError: The server cannot be reached, or does not send an order to join in time.
    """
    end = time.monotonic() + seconds
    with Connection(server, credentials) as connection:
        try:
            while time.monotonic() < end:
                if (data := connection.next_order()) is None:
                    continue
                order, _ = unseal(Order, data)
                if order.kind == "join":
                    return order
                connection.decline()
        except httpx.HTTPError as error:
            raise CoterieError(f"{reason_of(server, error)}.") from None
    raise CoterieError(
        f"{server} accepts the key of {credentials.name}, but did not ask this client to join a "
        "run; is the client listed in the run file?"
    )


def keep_serving(
    server: str, credentials: Credentials, worker: Worker, stop: threading.Event, seen: Seen
) -> None:
    """Execute the server's orders until the run ends, and reconnect after every interruption.

    Args:
        server: The server's address, HOST:PORT.
        credentials: The client's name, certificate and private key. The key file is read again
            after every interruption, so that a renewed file takes effect.
        worker: The worker that executes the orders.
        stop: An event; once it is set, the client disconnects before the next order.
        seen: A function that is called with "connected" and the server's address when the client
            has connected, and with "away" and the reason when it cannot reach the server.

    Raises:
        CoterieError: The server has refused the client's key or version for `REFUSED_SECONDS`.
    """
    pause, status, refused_since = FIRST_PAUSE, "", None

    def reached() -> None:
        nonlocal pause, status, refused_since
        if status != CONNECTED:
            seen("connected", server)
        pause, status, refused_since = FIRST_PAUSE, CONNECTED, None

    with Connection(server, credentials, reached) as connection:
        while not stop.is_set() and not (worker.finished and connection.reply is None):
            try:
                connection.serve(worker)
            except (httpx.HTTPError, CoterieError) as error:
                connection.disconnect()
                if (reason := reason_of(server, error, status == CONNECTED)) != status:
                    status = reason
                    seen("away", reason)
                refused_since = (refused_since or time.monotonic()) if is_refusal(error) else None
                if refused_since and time.monotonic() - refused_since > REFUSED_SECONDS:
                    raise CoterieError(f"{reason}.") from None
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

"""A mailbox and its server on loopback, and connections to it, for the tests of the network."""

import hashlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError
from coterie.network.address import listen
from coterie.network.client import keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.listener import Listener
from coterie.network.mailbox import Mailbox
from coterie.network.protocol import DIGEST, PROTOCOL, SESSION, VERSION, Progress
from coterie.network.server import MailboxServer

LARGEST = 40_000_000
"""The maximum size of a reply in bytes, unless a test chooses another one."""
A_SESSION = "0123456789abcdef" * 2
PING = (
    f"POST /session HTTP/1.1\r\nHost: x\r\n{PROTOCOL}: {VERSION}\r\n"
    f"{SESSION}: {A_SESSION}\r\nContent-Length: 0\r\n\r\n"
).encode()
"""A request that shows that the client is running, which is answered with 204."""
NO_TICKET = "0" * 32
"""A ticket that no order has."""
HERE = "127.0.0.1"
ORDER = b"the order " * 100
Events = list[tuple[str, object]]
REPLY = b"the reply " * 1000


@dataclass(frozen=True)
class Post:
    """A mailbox with a running server and registered clients, by default only anna."""

    folder: Path
    """The folder of the key files, such as anna.key."""
    keys: Keys
    mailbox: Mailbox
    server: MailboxServer
    port: int

    @property
    def address(self) -> str:
        """The server's address, HOST:PORT."""
        return f"localhost:{self.port}"

    @property
    def listener(self) -> Listener:
        """The listener of the server."""
        return self.server.listener

    def add(self, name: str) -> Credentials:
        """Register another client, which the server accepts within a second."""
        self.keys.add(name, self.folder / f"{name}.key")
        return self.credentials(name)

    def credentials(self, name: str = "anna") -> Credentials:
        """Return the contents of a client's key file."""
        return Credentials.load(self.folder / f"{name}.key")

    def context(self, name: str = "anna") -> ssl.SSLContext:
        """Return the TLS settings of a client."""
        return self.credentials(name).context()

    def plain(self, source: str = "127.0.0.1") -> socket.socket:
        """Open a connection without TLS from an address of this machine."""
        server = ("127.0.0.1", self.port)
        return socket.create_connection(server, timeout=20, source_address=(source, 0))

    def connect(self, context: ssl.SSLContext | None = None, source: str = HERE) -> ssl.SSLSocket:
        """Open a TLS connection, by default as anna."""
        plain = self.plain(source)
        try:
            return (context or self.context()).wrap_socket(plain, server_hostname="localhost")
        except BaseException:
            plain.close()
            raise

    def ping(self, context: ssl.SSLContext | None = None, source: str = "127.0.0.1") -> int:
        """Return the status of the response to `PING`; raise OSError if there is no response."""
        with self.connect(context, source) as connection:
            return ping(connection)

    def is_refused(self, context: ssl.SSLContext, source: str = "127.0.0.1") -> bool:
        """Return whether the server closes a connection instead of responding to `PING`."""
        try:
            self.ping(context, source)
        except TimeoutError:
            raise
        except OSError:
            return True
        return False

    def raw(self, request: bytes) -> bytes:
        """Return all bytes sent in response to some bytes of anna, until a second of silence."""
        response = b""
        with self.connect() as connection:
            connection.settimeout(1)
            with suppress(OSError):
                connection.sendall(request)
                while piece := connection.recv(65536):
                    response += piece
        return response

    def request(
        self, method: str, path: str, body: bytes = b"", name: str = "anna", **headers: str
    ) -> tuple[int, bytes]:
        """Return the status and body of the response to a client's request.

        Args:
            method: The request's method.
            path: The request's path.
            body: The request's body.
            name: The client's name.
            **headers: Further headers, with _ in place of -; they replace the default ones.
        """
        sent = {PROTOCOL: VERSION, SESSION: A_SESSION}
        sent |= {key.replace("_", "-"): value for key, value in headers.items()}
        options: Any = {"context": self.context(name), "timeout": 30}
        connection = http.client.HTTPSConnection("localhost", self.port, **options)
        try:
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def ping(connection: ssl.SSLSocket) -> int:
    """Return the status of the response to `PING`; raise OSError if there is no response."""
    connection.sendall(PING)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := connection.recv(1)):
            raise ConnectionResetError("the server closed the connection")
        head += byte
    return int(head.split()[1])


@contextmanager
def post(folder: Path, largest: int = LARGEST, clients: Any = ("anna",)) -> Iterator[Post]:
    """Run the server of a mailbox, with its keys and files in a folder."""
    keys = Keys.create(folder / "keys")
    for name in clients:
        keys.add(name, folder / f"{name}.key")
    listening = listen("127.0.0.1:0")
    mailbox = Mailbox(folder / "mailbox")
    with MailboxServer(mailbox, keys, listening, largest) as server:
        yield Post(folder, keys, mailbox, server, listening.getsockname()[1])


def wait(holds: Callable[[], object], seconds: float = 10) -> None:
    """Wait until something holds; fail if it does not."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_closed(connection: socket.socket, seconds: float = 10) -> bool:
    """Return whether the server closes a connection within some seconds without a response."""
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def send(post: Post, data: bytes = ORDER, seconds: float = 60) -> str:
    """Submit an order for anna, and return its ticket."""
    return post.mailbox.send("anna", data, 0, seconds)


def range_of(reply: bytes, start: int = 0) -> str:
    """Return the Content-Range of a reply from one of its bytes on."""
    return f"bytes {start}-{len(reply) - 1}/{len(reply)}"


def put(post: Post, ticket: str, reply: bytes = REPLY, start: int = 0, **headers: str) -> int:
    """Return the status of the response to an upload of a reply from one of its bytes on."""
    own = {DIGEST: hashlib.sha256(reply).hexdigest(), "Content_Range": range_of(reply, start)}
    headers = own | headers
    return post.request("PUT", f"/replies/{ticket}", reply[start:], **headers)[0]


def received(post: Post, ticket: str) -> int:
    """Return how many bytes of a reply the server has."""
    status, body = post.request("GET", f"/replies/{ticket}")
    assert status == 200
    return Progress.model_validate_json(body).received


def replies(post: Post, *tickets: str) -> list[tuple[str, bytes | None]]:
    """Return the replies that have arrived, or None for those that no longer can."""
    return list(post.mailbox.replies(tickets))


def upload_head(ticket: str, reply: bytes = REPLY, start: int = 0) -> bytes:
    """Return the head of a request that uploads a reply from one of its bytes on."""
    return (
        f"PUT /replies/{ticket} HTTP/1.1\r\nHost: x\r\n{PROTOCOL}: {VERSION}\r\n"
        f"{SESSION}: {A_SESSION}\r\n{DIGEST}: {hashlib.sha256(reply).hexdigest()}\r\n"
        f"Content-Length: {len(reply) - start}\r\nContent-Range: {range_of(reply, start)}\r\n\r\n"
    ).encode()


def begin_upload(post: Post, ticket: str, number: int, start: int = 0) -> ssl.SSLSocket:
    """Send a reply up to a number of its bytes, and return the open connection."""
    connection = post.connect()
    connection.sendall(upload_head(ticket, start=start) + REPLY[start:number])
    wait(lambda: stored(post, ticket) >= number)
    return connection


def stored(post: Post, ticket: str) -> int:
    """Return the size of a reply's file."""
    path = post.mailbox.files.folder / f"{ticket}.reply"
    return path.stat().st_size if path.exists() else 0


class Idle:
    """A worker that gets no orders."""

    finished = False

    def answer(self, data: bytes) -> bytes:
        raise AssertionError(data)


@contextmanager
def running(address: str, credentials: Credentials, worker: Any = None) -> Iterator[Events]:
    """Run a client in a thread, by default without orders.

    Yields:
        The events that the client shows. An error that ends the client is the event "error".
    """
    stop, events = threading.Event(), Events()

    def run() -> None:
        def seen(event: str, value: object) -> None:
            events.append((event, value))

        try:
            keep_serving(address, credentials, worker or Idle(), stop, seen)
        except CoterieError as error:
            events.append(("error", str(error)))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield events
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()

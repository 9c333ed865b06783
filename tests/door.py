"""A door to knock at in tests, and a server behind it that notes what gets through."""

import asyncio
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from coterie.network.door import Door, Settings
from coterie.network.keys import Keys, Kit


@dataclass(frozen=True)
class Seen:
    """A request that reached the SuperLink's place."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Upstream(ThreadingHTTPServer):
    """Stands for the SuperLink: answers everything, and notes it."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, keys: Keys) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[Seen] = []
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys.certificate, keys.key)
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    @property
    def port(self) -> int:
        return self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that were cut."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self) -> None:
        assert isinstance(self.server, Upstream)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append(Seen(self.command, self.path, headers, body))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = do_OPTIONS = do_DELETE = do_PATCH = answer

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass(frozen=True)
class Entrance:
    """A door, what is behind it, and ways to knock as the client anna."""

    folder: Path
    keys: Keys
    door: Door
    upstream: Upstream
    port: int

    def context(self, kit: str = "anna.key") -> ssl.SSLContext:
        return Kit.load(self.folder / kit).context()

    def connect(self, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return (context or self.context()).wrap_socket(plain, server_hostname="localhost")

    def raw(self, request: bytes) -> bytes:
        """Everything that is answered to some bytes, until the other side hangs up or is idle."""
        answer = b""
        with self.connect() as connection:
            connection.settimeout(1)
            with suppress(OSError):
                connection.sendall(request)
                while piece := connection.recv(65536):
                    answer += piece
        return answer

    def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        return self.send("POST", path, body, **headers)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", self.port, context=self.context(), timeout=20
        )
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def entrance(
    folder: Path, largest: int, order: int = 10**12, behind: Keys | None = None
) -> Iterator[Entrance]:
    """A door, in a thread, before an upstream; `behind`: the upstream's keys, if it has others
    than the door is told."""
    keys, loopback = Keys.create(folder / "keys"), Keys.create(folder / "loopback")
    keys.add("anna", folder / "anna.key")
    upstream = Upstream(behind or loopback)
    thread = threading.Thread(target=upstream.serve_forever, daemon=True)
    thread.start()
    log = str(folder / "door.log")
    door = Door(Settings(str(keys.folder), upstream.port, str(loopback.ca), largest, order, log))
    listening = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listening.getsockname()[1]
    loop = asyncio.new_event_loop()
    serving = loop.create_task(door.serve(listening))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    asking = threading.Thread(target=serve, daemon=True)
    asking.start()
    try:
        yield Entrance(folder, keys, door, upstream, port)
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        asking.join()
        loop.close()
        upstream.shutdown()
        thread.join()
        upstream.server_close()

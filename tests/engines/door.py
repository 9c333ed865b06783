"""A proxy to knock at in tests, and a server behind it that notes what gets through."""

import datetime
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coterie.engines.flower.proxy import Proxy, ProxyFiles


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

    def __init__(self, keys: ProxyFiles) -> None:
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
        """Say nothing of connections that nginx refused."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

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


def make_keys(folder: Path) -> ProxyFiles:
    """An authority, and a certificate of its for localhost."""
    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)

    def sign(name: str, issuer: str, public, key, authority: bool) -> bytes:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder(named(issuer), named(name), public, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    files = ProxyFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    files.ca.write_bytes(sign("ca", "ca", authority.public_key(), authority, True))
    files.certificate.write_bytes(sign("server", "ca", server.public_key(), authority, False))
    files.key.write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@dataclass(frozen=True)
class Door:
    """A proxy, what is behind it, and ways to knock."""

    proxy: Proxy
    upstream: Upstream
    port: int
    context: ssl.SSLContext

    def connect(self) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        return self.context.wrap_socket(plain, server_hostname="localhost")

    def raw(self, request: bytes) -> bytes:
        """Everything that is answered to some bytes, until the other side hangs up or is idle."""
        answer = b""
        with self.connect() as connection:
            connection.settimeout(0.3)
            with suppress(OSError):
                connection.sendall(request)
                while piece := connection.recv(65536):
                    answer += piece
        return answer

    def post(self, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        return self.send("POST", path, body, **headers)

    def send(
        self, method: str, path: str, body: bytes | Iterator[bytes] = b"", **headers: str
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", self.port, context=self.context, timeout=20
        )
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(
                method, path, body, named, encode_chunked="Transfer-Encoding" in named
            )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def door(folder: Path, keys: ProxyFiles, behind: ProxyFiles, largest: int) -> Iterator[Door]:
    """A proxy before an upstream that shows the certificate `behind`."""
    upstream = Upstream(behind)
    thread = threading.Thread(target=upstream.serve_forever, daemon=True)
    thread.start()
    port = free_port()
    context = ssl.create_default_context(cafile=keys.ca)
    parts = (keys.ca, keys.certificate, keys.key)
    try:
        with Proxy(folder, f"127.0.0.1:{port}", upstream.port, *parts, largest) as proxy:
            yield Door(proxy, upstream, port, context)
    finally:
        upstream.shutdown()
        thread.join()
        upstream.server_close()

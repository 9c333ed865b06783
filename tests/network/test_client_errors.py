"""A client whose server refuses it, cannot be reached, has a wrong certificate, or is hostile."""

import gzip
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from mail import Idle, Post, running, wait

from coterie.errors import CoterieError
from coterie.messages.message import LARGEST_MESSAGE
from coterie.network import certificates
from coterie.network import client as client_module
from coterie.network import keys as keys_module
from coterie.network.client import LARGEST_JSON, Connection, first_order, keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.protocol import Offer
from coterie.network.proxy import proxy_for, through_proxy

SENTENCE = re.compile(r"[^\n]{1,300}")


class Hostile:
    """A server with the keys of a deployment, which gives every request the same response."""

    def __init__(self, keys: Keys) -> None:
        self.response: bytes = b""
        self.endless = False
        """Whether bytes without end follow the response."""
        self.requests: list[str] = []
        """The first lines of the requests, and their headers."""
        self.sent = 0
        """Number of bytes of the longest endless response that have been sent."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(keys.certificate, keys.key)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self._respond, args=(plain,), daemon=True).start()

    def _respond(self, plain: socket.socket) -> None:
        with plain, suppress(OSError), self.context.wrap_socket(plain, server_side=True) as tls:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                if not (byte := tls.recv(1)):
                    return
                head += byte
            self.requests.append(head.decode("latin-1"))
            tls.sendall(self.response)
            sent = 0
            while self.endless:
                tls.sendall(bytes(1 << 16))
                sent += 1 << 16
                self.sent = max(self.sent, sent)
            tls.unwrap()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys.create(tmp_path / "keys")
    keys.add("anna", tmp_path / "anna.key")
    return keys


@pytest.fixture
def anna(keys: Keys, tmp_path: Path) -> Credentials:
    return Credentials.load(tmp_path / "anna.key")


@contextmanager
def serving(keys: Keys) -> Iterator[Hostile]:
    server = Hostile(keys)
    try:
        yield server
    finally:
        server.endless = False
        server.listening.shutdown(socket.SHUT_RDWR)
        server.listening.close()


@pytest.fixture
def hostile(keys: Keys) -> Iterator[Hostile]:
    with serving(keys) as server:
        yield server


def away(server: str, anna: Credentials) -> str:
    """Return what a client reports about a server that it cannot reach."""
    stop, events = threading.Event(), []

    def seen(event: str, value: object) -> None:
        events.append((event, value))
        if event == "away":
            stop.set()

    keep_serving(server, anna, Idle(), stop, seen)
    event, reason = events[-1]
    assert event == "away"
    assert SENTENCE.fullmatch(str(reason))
    assert not str(reason).endswith(".")
    return str(reason)


def response(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Return a response as bytes; _ in the names of headers stands for -."""
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()]
    length = f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status}\r\n{''.join(lines)}{length}\r\n".encode() + body


def offer(size: int) -> bytes:
    return Offer(ticket="0" * 32, size=size, digest="0" * 64).model_dump_json().encode()


BOMB = gzip.compress(bytes(10_000_000), mtime=0)  # the same in each process of a parallel run
INVALID = "sent an invalid response"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (response(BOMB, Content_Encoding="gzip"), f"{INVALID} (the server's response is comp"),
        (response(bytes(LARGEST_JSON + 1)), f"{INVALID} (the server's response is too long)"),
        (response(b"\xff" * 1000), f"{INVALID} (the server's response is not valid)"),
        (response(b"{}"), f"{INVALID} (the server's response is not valid)"),
        (response(offer(5).replace(b"0" * 32, b"../../anna")), "response is not valid"),
        (response(offer(LARGEST_MESSAGE + 1)), f"{INVALID} (the server's order is too large)"),
        (response(offer(5)), f"{INVALID} (the server's order is longer than announced)"),
        (response(status="307 X", Location="https://localhost:1/"), "responded with status 307"),
        (response(b"<html>", "500 Oh"), "responded with status 500"),
        (response(status="403 X"), "has removed this key, or this client has too many"),
        (response(status="409 X"), "is connected to another process that uses this key; stop one"),
        (response(status="426 X"), "uses another version of the protocol; install the same"),
        (response(status="507 X"), "could not store this client's reply; its disk may be full"),
        (b"\x00\x1b[2J\n" * 10, INVALID),
        (b"HTTP/1.1 200 OK\r\n" + b"a\x1b: " + 50_000 * b"x" + b"\r\n\r\n", INVALID),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n", INVALID),
        (b"", "closed the connection; if this repeats, the server has removed or renewed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", "was interrupted"),
    ],
)
def test_hostile_responses_are_refused(answer, reason, hostile: Hostile, anna: Credentials) -> None:
    hostile.response = answer
    assert reason in away(hostile.address, anna)
    paths = {request.split()[1] for request in hostile.requests}
    assert paths <= {"/order", "/session", f"/orders/{'0' * 32}"}


@pytest.mark.parametrize("status", ["200 OK", "204 No Content", "500 Oh"])
@pytest.mark.parametrize("coding", ["gzip", "identity", ""])
def test_a_response_without_end_is_not_read(
    status: str, coding: str, hostile: Hostile, anna: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_SECONDS", 0.1)
    head = f"HTTP/1.1 {status}\r\nContent-Length: {10**12}\r\n"
    coded = f"Content-Encoding: {coding}\r\n" if coding else ""
    hostile.response, hostile.endless = f"{head}{coded}\r\n".encode(), True
    with Connection(hostile.address, anna) as connection:
        connection.connect()
        wait(lambda: len(hostile.requests) >= 3)  # heartbeats
        with suppress(client_module.httpx.HTTPError):
            connection.next_order()
    assert any("GET /order" in request for request in hostile.requests)
    assert hostile.sent < 20 << 20  # what fits into the buffers of both ends


def test_an_overlong_order_is_not_held_in_memory(hostile: Hostile, anna: Credentials) -> None:
    memory = psutil.Process().memory_info
    with Connection(hostile.address, anna) as connection:
        hostile.endless = True
        hostile.response = f"HTTP/1.1 200 OK\r\nContent-Length: {10**12}\r\n\r\n".encode()
        connection.offer = Offer(ticket="0" * 32, size=1000, digest="0" * 64)
        before = memory().rss
        with pytest.raises(client_module.httpx.RemoteProtocolError, match="longer than announced"):
            connection.next_order()
        assert memory().rss - before < 50 << 20


def expired(keys: Keys, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
    keys.certify()


def early(keys: Keys, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(certificates, "DAY", -timedelta(days=1))
    keys.certify()


def elsewhere(keys: Keys, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keys_module, "LOOPBACK", ("example.org",))
    patch.setattr(Keys, "hosts", lambda _: ["example.org"])
    keys.certify()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (expired, "has a certificate that has expired, by this machine's clock, which says "),
        (early, "has a certificate that is not valid yet, by this machine's clock, which says "),
        (
            elsewhere,
            "has a certificate that is not valid for this host name or address; on the server, add "
            "the name to the certificate with `coterie keys certify --host`",
        ),
    ],
)
def test_certificate_faults_are_named(change, reason, keys, anna: Credentials, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        change(keys, patch)
    with serving(keys) as server:
        assert away(server.address, anna).startswith(f"{server.address} {reason}")
        assert not server.requests


def test_another_authority_is_not_trusted(post: Post, tmp_path: Path) -> None:
    Keys.create(tmp_path / "other").add("anna", tmp_path / "other.key")
    reason = away(post.address, Credentials.load(tmp_path / "other.key"))
    assert reason.endswith("an authority that this key file does not trust")
    assert post.mailbox.present() == {}


def test_a_server_that_cannot_be_reached_is_waited_for(anna: Credentials) -> None:
    assert away("localhost:1", anna) == "localhost:1 is unreachable"


def test_a_server_that_does_not_speak_tls_is_waited_for(anna: Credentials) -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"localhost:{plain.getsockname()[1]}"

        def accept() -> None:
            with plain.accept()[0] as connection:
                connection.recv(10_000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")

        threading.Thread(target=accept, daemon=True).start()
        assert away(address, anna) == f"{address} is unreachable"


def test_a_key_file_is_waited_for(keys, anna: Credentials, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
    keys.renew("anna", tmp_path / "late.key").replace(anna.path)
    assert "expired on" in away("localhost:1", anna)
    anna.path.unlink()
    assert "Could not read the key file" in away("localhost:1", anna)


def test_another_protocol_ends_the_client(hostile: Hostile, anna: Credentials, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 1.0)
    hostile.response = response(status="426 X")
    with running(hostile.address, anna) as events:
        wait(lambda: events[-1:] and str(events[-1][1]).endswith("Coterie on both sides."), 20)


def test_a_client_that_cannot_reach_its_server_does_not_end(anna: Credentials, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 0.1)
    with running("localhost:1", anna) as events:
        time.sleep(2)
        assert events == [("away", "localhost:1 is unreachable")]


def test_no_first_order_is_waited_for_if_the_server_cannot_be_reached(anna: Credentials) -> None:
    with pytest.raises(CoterieError, match=r"^localhost:1 is unreachable\.$"):
        first_order("localhost:1", anna, 20)


def test_a_proxy_of_the_environment_is_asked_for_a_tunnel(anna: Credentials, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        requests: list[bytes] = []

        def accept() -> None:
            with proxy.accept()[0] as connection:
                requests.append(connection.recv(1000))

        thread = threading.Thread(target=accept)
        thread.start()
        reason = away("coterie.example.org:9092", anna)
        thread.join()
        address = f"127.0.0.1:{proxy.getsockname()[1]}"
    assert requests[0].startswith(b"CONNECT coterie.example.org:9092 HTTP/1.1")
    through = f"through the proxy {address} (https_proxy)"
    assert reason.startswith(f"coterie.example.org:9092 closed the connection {through}; if this")
    reason = away("coterie.example.org:9092", anna)
    assert reason == f"coterie.example.org:9092 is unreachable {through}"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "[::1]", "LocalHost"])
def test_this_machine_is_reached_without_a_proxy(host, anna: Credentials, monkeypatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert away(f"{host}:1", anna) == f"{host}:1 is unreachable"
    assert proxy_for(f"{host}:1") is None
    assert through_proxy("192.0.2.1:1") == " through the proxy 127.0.0.1:9 (https_proxy)"
    monkeypatch.setenv("no_proxy", "2001:db8::1")
    assert proxy_for("[2001:db8::1]:1") is None


def test_only_the_key_files_authority_is_trusted(
    hostile: Hostile, anna: Credentials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    hostile.response = response(status="500 Oh")
    assert "responded with status 500" in away(hostile.address, anna)
    assert "accept-encoding: identity" in hostile.requests[0].lower()

"""A client of a server that means harm, has moved or shows a wrong certificate: it lives on."""

import gzip
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesResponse
from flwr.proto.node_pb2 import Node

from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.network import certificates
from coterie.network import keys as keys_module
from coterie.network.flower import fleet
from coterie.network.keys import Keys, Kit

Answer = tuple[int, dict[str, str], bytes]


class Hostile(ThreadingHTTPServer):
    """Answers every call in the same way."""

    daemon_threads = True
    answer: Answer = (200, {}, b"")
    asked = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that hung up."""


class Handler(BaseHTTPRequestHandler):
    server: Hostile  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked += 1
        status, headers, body = self.server.answer
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys.create(tmp_path / "keys")
    keys.add("anna", tmp_path / "anna.key")
    return keys


@pytest.fixture
def kit(keys: Keys, tmp_path: Path) -> Kit:
    return Kit.load(tmp_path / "anna.key")


@contextmanager
def serving(keys: Keys) -> Iterator[Hostile]:
    """A server with these keys."""
    server = Hostile(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys.certificate, keys.key)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hostile(keys: Keys) -> Iterator[Hostile]:
    with serving(keys) as server:
        yield server


def address(server: Hostile) -> str:
    return f"localhost:{server.server_address[1]}"


def away(server: str, kit: Kit, tmp_path: Path) -> str:
    """What a client says of a server that it does not get to."""
    stop, said = threading.Event(), []

    def seen(what: str, value: object) -> None:
        said.append((what, value))
        stop.set()

    worker = Worker(Site("anna", {}, tmp_path / "out"))
    fleet.keep_serving(server, kit, worker, stop, seen)
    [(what, why)] = said
    assert what == "away"
    return str(why)


BOMB = gzip.compress(bytes(100_000_000))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {"Content-Encoding": "gzip"}, BOMB), "is unreachable"),
        ((200, {}, bytes(fleet.LARGEST_ANSWER + 1)), "closed the connection"),
        ((200, {}, b"\xff" * 1000), "closed the connection"),
        ((307, {"Location": "https://localhost:1/elsewhere"}, b""), "responded with status 307"),
        ((500, {}, b"<html>"), "responded with status 500"),
    ],
    ids=["gzip", "too large", "no protobuf", "redirected", "an error"],
)
def test_a_hostile_answer_is_no_more_than_a_lost_connection(
    answer: Answer, why: str, hostile: Hostile, kit: Kit, tmp_path: Path
) -> None:
    hostile.answer = answer
    assert why in away(address(hostile), kit, tmp_path)
    assert hostile.asked == 1  # and nobody was followed


def test_a_hostile_message_is_passed_over(
    hostile: Hostile, kit: Kit, tmp_path: Path, caplog
) -> None:
    found = PullMessagesResponse()
    found.messages_list.add().metadata.run_id = 1
    found.message_object_trees.add().object_id = "no hash"
    hostile.answer = (200, {}, found.SerializeToString())
    client = fleet.Fleet(address(hostile), kit)
    connection = fleet.Connection(client, Node(node_id=1), kit.ca)
    assert connection._one(Worker(Site("anna", {}, tmp_path / "out")))
    assert "rejected a message from the server" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (60, r"this machine's clock is (59|60|61|62) seconds ahead of that of localhost"),
        (-600, r"this machine's clock is (598|599|600) seconds behind that of localhost"),
        (0, "still has an open connection with this key"),
    ],
)
def test_a_clock_that_is_wrong_is_told_by_the_servers(
    seconds: int, why: str, hostile: Hostile, kit: Kit, tmp_path: Path
) -> None:
    there = datetime.now(UTC) - timedelta(seconds=seconds)
    hostile.answer = (401, {"Date": format_datetime(there, usegmt=True)}, b"")
    assert re.search(why, away(address(hostile), kit, tmp_path))


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
    ("change", "why"),
    [
        (expired, "has a certificate that has expired, by this machine's clock"),
        (early, "has a certificate that is not valid yet, by this machine's clock"),
        (elsewhere, "is not among the names in its server's certificate"),
    ],
)
def test_what_is_wrong_with_a_servers_certificate_is_a_sentence(
    change: Callable[[Keys, pytest.MonkeyPatch], None],
    why: str,
    keys: Keys,
    kit: Kit,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        change(keys, patch)
    with serving(keys) as server:
        assert why in away(address(server), kit, tmp_path)


def test_a_server_that_is_not_there_is_waited_for(kit: Kit, tmp_path: Path) -> None:
    assert away("localhost:1", kit, tmp_path) == "localhost:1 is unreachable"


def test_a_kit_that_has_expired_is_waited_for_to_be_replaced(
    keys: Keys, kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "CERTIFICATE_LASTS", timedelta(hours=-1))
    keys.renew("anna", tmp_path / "late.key").replace(tmp_path / "anna.key")
    assert "expired on" in away("localhost:1", kit, tmp_path)


def test_answers_are_asked_for_as_they_are(hostile: Hostile, kit: Kit) -> None:
    sent: list[httpx.Request] = []
    client = fleet.Fleet(address(hostile), kit)
    client._client.event_hooks = {"response": [lambda answer: sent.append(answer.request)]}
    client.ActivateNode(ActivateNodeRequest())
    assert sent[0].headers["accept-encoding"] == "identity"


def test_a_proxy_of_the_environment_is_asked_for_a_tunnel(kit, tmp_path, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        asked: list[bytes] = []

        def take() -> None:
            connection, _ = proxy.accept()
            with connection:
                asked.append(connection.recv(1000))

        thread = threading.Thread(target=take)
        thread.start()
        away("coterie.example.org:9092", kit, tmp_path)
        thread.join()
    assert asked[0].startswith(b"CONNECT coterie.example.org:9092 HTTP/1.1")


def test_the_systems_authorities_are_not_even_read(hostile, kit, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    hostile.answer = (500, {}, b"")
    assert "responded with status 500" in away(address(hostile), kit, tmp_path)

"""Clients without a key, with another key or with invalid replies are refused; the run ends."""

import os
import secrets
import shutil
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from coterie.bases import EMBEDDED
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.messages import Message
from coterie.messages.envelope import Order, Reply, seal, unseal

pytest.importorskip("aiohttp", reason="the extra deployment is not installed")
from sites import Deployment

from coterie.network.client import Connection, keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.protocol import PROTOCOL, SESSION, VERSION

pytestmark = pytest.mark.slow
MiB = 2**20
WRITERS = EMBEDDED / "demo-writers"
NAMES = ("diarist", "lexicographer", "poet", "whaler")
ROGUE = "lexicographer"
"""Holds a valid key, and means harm."""


@pytest.fixture(scope="module")
def deployment(values, tmp_path_factory) -> Iterator[Deployment]:
    """A run in its first round, which waits for one of its clients; two strangers knock."""
    clients = [{"name": name, "path": f"{name}.txt"} for name in NAMES]
    run = values(data_root=str(WRITERS), clients=clients)
    folder = tmp_path_factory.mktemp("intruders") / "run"
    with Deployment(folder, run) as deployment:
        deployment.make_keys()
        shutil.copytree(folder / "keys", folder / "copy")
        Keys(folder / "copy").add("stranger", folder / "stranger.key")  # of the same authority
        Keys.create(folder / "elsewhere").add("foreigner", folder / "foreigner.key")
        deployment.serve()
        deployment.join("stranger", "foreigner", *sorted({*NAMES} - {ROGUE}))
        yield deployment


class Rogue(Worker):
    """A client with a valid key whose answers to steps are what it is told to send."""

    def __init__(self, deployment: Deployment, out: Path) -> None:
        text = {"path": str(deployment.texts[ROGUE])}
        super().__init__(Site(ROGUE, text, out, deployment.base_of(ROGUE)))
        self.deployment = deployment
        self.answers: list[Callable[[bytes], bytes]] = []
        self.stop = threading.Event()

    def answer(self, data: bytes) -> bytes:
        reply = super().answer(data)
        if unseal(Order, data)[0].kind != "step" or not self.answers:
            return reply
        self.stop.set()
        return self.answers.pop()(reply)

    def connection(self) -> Connection:
        """Connect as this client, once the server runs."""
        credentials = Credentials.load(self.deployment.folder / f"{ROGUE}.key")
        connection = Connection(f"localhost:{self.deployment.port}", credentials)

        def is_served() -> bool:
            with suppress(httpx.HTTPError):
                connection._request("POST", "/session")
                return True
            return False

        self.deployment.wait(is_served)
        return connection

    def serve(self, connection: Connection, answer: Callable[[bytes], bytes]) -> None:
        """Execute orders until a step has been answered so; for two minutes at most."""
        self.answers, self.stop = [answer], threading.Event()
        end = time.monotonic() + 120
        with connection:
            while time.monotonic() < end and not (self.stop.is_set() and connection.reply is None):
                connection.serve(self)

    def send(self, answer: Callable[[bytes], bytes], refusal: str) -> None:
        """Answer the next step so; return when the server's log refuses the answer."""
        before = self.deployment.logs()

        def refused() -> bool:
            return refusal in self.deployment.log(before)

        for _ in range(3):  # the first step may be one that an earlier connection was sent
            self.serve(self.connection(), answer)
            with suppress(AssertionError):
                self.deployment.wait(refused, 10)
                break
        assert refused()


@pytest.fixture(scope="module")
def rogue(deployment, tmp_path_factory) -> Iterator[Rogue]:
    worker = Rogue(deployment, tmp_path_factory.mktemp("rogue"))
    yield worker
    worker.close()


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    """Return a change of a reply whose first tensor differs."""

    def changed(reply: bytes) -> bytes:
        header, body = unseal(Reply, reply)
        message = Message.decode(body)
        first = min(message["adapter"])
        tensors = {**message["adapter"], first: change(message["adapter"][first])}
        return seal(header, Message(message.exchange, {"adapter": tensors}).encode())

    return changed


def renamed(reply: bytes) -> bytes:
    header, body = unseal(Reply, reply)
    return seal(header.model_copy(update={"client": "poet"}), body)


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (with_tensors(lambda t: torch.full_like(t, float("nan"))), "non-finite values"),
        (with_tensors(lambda t: t[:1]), "has shape (1, "),
        (
            renamed,
            f"rejected a message from {ROGUE}: The message belongs to another run or client.",
        ),
        (lambda _: os.urandom(1000), f"rejected a message from {ROGUE}: The bytes received"),
        (lambda reply: reply + os.urandom(300 * MiB), f"the limit is {256 * MiB}"),
    ],
    ids=["nan", "shape", "another's name", "random bytes", "300 MiB"],
)
def test_what_a_client_with_a_key_may_not_send(deployment, rogue, answer, refusal) -> None:
    rogue.send(answer, refusal)
    assert deployment.programs["server"].process.poll() is None


def test_half_a_reply(deployment, rogue) -> None:
    """Let a client stop while it sends; the server continues, and the client returns."""
    before = deployment.logs()

    def cut() -> Iterator[bytes]:
        yield b"x" * 500
        raise httpx.WriteError("the cable was cut")

    def half(self: Connection) -> None:
        assert self.offer is not None
        assert self.http is not None
        headers = {"Content-Range": "bytes 0-999/1000", "Content-Length": "1000"}
        with suppress(httpx.HTTPError):
            self.http.put(f"/replies/{self.offer.ticket}", headers=headers, content=cut())
        self.reply = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "_send_reply", half)
        connection = rogue.connection()
        with connection:
            connection.serve(rogue)
    deployment.wait(lambda: f"{ROGUE} disconnected" in deployment.log(before))
    assert deployment.programs["server"].process.poll() is None


class Requests:
    """Plain HTTPS requests to the server with the certificate of the rogue."""

    def __init__(self, deployment: Deployment) -> None:
        self.client = httpx.Client(
            verify=Credentials.load(deployment.folder / f"{ROGUE}.key").context(),
            base_url=f"https://localhost:{deployment.port}",
            headers={PROTOCOL: VERSION, SESSION: secrets.token_hex(16)},
        )

    def status(self, method: str, path: str, **arguments: Any) -> int:
        return self.client.request(method, path, **arguments).status_code


@pytest.fixture
def requests(deployment, rogue) -> Requests:
    with rogue.connection():
        pass  # the server runs, and the rogue has left
    return Requests(deployment)


def test_requests_without_a_certificate_end_in_the_handshake(deployment, requests) -> None:
    before = deployment.logs()
    trusting = ssl.create_default_context(cafile=deployment.folder / "keys/ca.pem")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://localhost:{deployment.port}/order", verify=trusting)
    line = "refused a connection from 127.0.0.1: no client certificate"
    deployment.wait(
        lambda: line in deployment.log(before) or "127.0.0.1 in a minute" in deployment.log(before)
    )


def test_what_is_not_for_this_client_is_not_there(deployment, requests) -> None:
    for method, path in [("GET", "/"), ("GET", "/health"), ("POST", "/order")]:
        assert requests.status(method, path) in (404, 405)
    for method, path in [("GET", "orders"), ("GET", "replies"), ("PUT", "replies")]:
        assert requests.status(method, f"/{path}/{'0' * 32}") == 410
    requests.status("DELETE", "/session")


def test_bytes_that_are_no_tls(deployment, requests) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03" + os.urandom(1000), os.urandom(100_000)):
        response = b""
        connection = socket.create_connection(("127.0.0.1", deployment.port), timeout=30)
        with connection, suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                response += piece
        assert b"HTTP/" not in response
    assert requests.status("POST", "/session") == 204  # the server still runs
    requests.status("DELETE", "/session")


def test_keys_that_are_not_registered_and_the_end_of_the_run(deployment, rogue) -> None:
    """Let the rogue send valid replies; the run then ends with all clients."""
    programs = deployment.programs
    reasons = {
        "stranger": "closed the connection",
        "foreigner": "that this key file does not trust; retrying",
    }
    for name, reason in reasons.items():
        deployment.wait(lambda name=name, reason=reason: reason in programs[name].text)
        assert programs[name].text.count(reason) == 1  # however often it tries
        assert "connected to" not in programs[name].text
        programs[name].process.send_signal(signal.SIGINT)
    credentials, stop = Credentials.load(deployment.folder / f"{ROGUE}.key"), threading.Event()
    rogue.answers = []
    bound = threading.Timer(180, stop.set)
    bound.start()
    keep_serving(f"localhost:{deployment.port}", credentials, rogue, stop, lambda *_: None)
    bound.cancel()
    codes = deployment.ends()
    assert {codes.pop("stranger"), codes.pop("foreigner")} == {130}
    assert set(codes.values()) == {0}
    for name in ("diarist", "poet", "whaler"):
        assert deployment.counted(name) == [0, 1, 2]
    assert deployment.counted(ROGUE) == [0, 0, 1, 2]  # that of the wrong shape had come whole
    text = deployment.programs["server"].text + deployment.log()
    assert "Traceback" not in text
    assert not list(Path(deployment.folder).rglob("*.tmp"))

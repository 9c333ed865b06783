"""Who has no key, another's key or bad intentions is refused, and the run comes to its end."""

import os
import re
import shutil
import signal
import socket
import ssl
import threading
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

pytest.importorskip("flwr", reason="Flower is not installed")
from flwr.app import Message as FlowerMessage
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, push_objects
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from sites import Deployment

from coterie.network.flower import fleet
from coterie.network.flower.parcel import content, prepare
from coterie.network.keys import Keys, Kit

pytestmark = pytest.mark.slow
MiB = 2**20
WRITERS = EMBEDDED / "demo-writers"
NAMES = ("diarist", "lexicographer", "poet", "whaler")
ROGUE = "lexicographer"
"""Holds a valid key, and means harm."""


@pytest.fixture(scope="module")
def here(values, tmp_path_factory) -> Iterator[Deployment]:
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

    def connection(self) -> fleet.Connection:
        """Let in as this client, once the server is there."""

        def connected() -> fleet.Connection | None:
            with suppress(httpx.HTTPError):
                kit = Kit.load(self.deployment.folder / f"{ROGUE}.key")
                return fleet.connect(f"localhost:{self.deployment.port}", kit)

        return self.deployment.wait(connected)

    def serve(self, connection: fleet.Connection, answer: Callable[[bytes], bytes]) -> None:
        """Do what is ordered, until a step has been answered so; two minutes at most."""
        self.answers, self.stop = [answer], threading.Event()
        bound = threading.Timer(120, self.stop.set)
        bound.start()
        with suppress(ObjectPushError):  # what is refused when it is announced finds no taker
            connection.serve(self, self.stop)
        bound.cancel()

    def send(self, answer: Callable[[bytes], bytes], refusal: str) -> None:
        """Answer the next step so; returns when the server's log refuses it."""
        before = self.deployment.logs()
        connection = self.connection()

        def refused() -> bool:
            return refusal in self.deployment.log(before)

        for _ in range(3):  # the first step may be one that an earlier connection was sent
            self.serve(connection, answer)
            with suppress(AssertionError):
                self.deployment.wait(refused, 10)
                break
        assert refused()
        connection.leave()


@pytest.fixture(scope="module")
def rogue(here, tmp_path_factory) -> Iterator[Rogue]:
    worker = Rogue(here, tmp_path_factory.mktemp("rogue"))
    yield worker
    worker.close()


def with_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[bytes], bytes]:
    """A reply whose first tensor is changed."""

    def changed(reply: bytes) -> bytes:
        header, body = unseal(Reply, reply)
        message = Message.decode(body)
        first = min(message["adapter"])
        tensors = {**message["adapter"], first: change(message["adapter"][first])}
        return seal(header, Message(message.round, {"adapter": tensors}).encode())

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
        (
            lambda reply: reply + os.urandom(300 * MiB),
            f"rejected a message: The message exceeds {256 * MiB:,} bytes.",
        ),
    ],
    ids=["nan", "shape", "another's name", "random bytes", "300 MiB"],
)
def test_what_a_client_with_a_key_may_not_send(here, rogue, answer, refusal) -> None:
    rogue.send(answer, refusal)
    assert here.programs["server"].process.poll() is None


@pytest.mark.parametrize("what", ["half a message", "no message"])
def test_a_message_that_flower_cannot_read(here, rogue, what) -> None:
    """Announced and never sent; or objects of Flower's that are no message."""
    before = here.logs()
    connection = rogue.connection()

    def spoiled(self: fleet.Connection, reply: FlowerMessage, run: int) -> None:
        message, tree, objects = prepare(reply)
        if what == "no message":
            tree = tree.children[0]
            message.metadata.message_id = tree.object_id
        request = PushMessagesRequest(
            node=self.node, messages_list=[message], message_object_trees=[tree]
        )
        pushed = self.client.PushMessages(request)
        if what == "no message":
            push = make_push_object_fn_protobuf(
                self.client.PushObject, self.node, run, pushed.session_id
            )
            push_objects(objects, push, object_ids_to_push=set(pushed.objects_to_push))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet.Connection, "_push", spoiled)
        rogue.serve(connection, lambda reply: reply)
    if what == "no message":
        here.wait(lambda: "rejected a message: Expected object of type Message" in here.log(before))
    connection.leave()
    here.wait(lambda: f"{ROGUE} disconnected" in here.log(before))  # the server goes on looking
    assert here.programs["server"].process.poll() is None


def test_orders_of_another_client_and_the_end_of_another_s_connection(
    here, rogue, monkeypatch
) -> None:
    """Flower takes an order from whoever says that it is the server, for any node whose number is
    known; numbers stand in its log. Clients know by the signature. Nobody signs another off."""
    connection, log = rogue.connection(), here.server.path / "flower/superlink.log"
    others = {int(n) for n in re.findall(r"Activated node_id=(\d+)", log.read_text())}
    others -= {connection.node.node_id}
    [run] = re.findall(r"Created run (\d+)", log.read_text())
    honest = sorted({*NAMES} - {ROGUE})
    before = {name: here.client_log(name) for name in honest}
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_run_id", int(run))
    monkeypatch.setattr(TaskIdentity, "_node_id", SUPERLINK_NODE_ID)
    for node in others:
        finish = Order(run="0" * 16, client="poet", kind="finish", round=0)
        forged = FlowerMessage(content(seal(finish, b"")), node, "train", ttl=600.0)
        connection._push(forged, int(run))
        with pytest.raises(httpx.HTTPStatusError) as refusal:
            connection.client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        assert refusal.value.response.status_code == 401
    connection.leave()
    for name in honest:
        here.wait(
            lambda name=name: "was not signed by" in here.client_log(name)[len(before[name]) :]
        )
        assert here.programs[name].process.poll() is None


class Knocks:
    """Plain HTTPS to the server, with the certificate of the rogue or another client."""

    def __init__(self, here: Deployment, name: str = ROGUE) -> None:
        context = Kit.load(here.folder / f"{name}.key").context()
        self.client = httpx.Client(verify=context, base_url=f"https://localhost:{here.port}")

    def post(self, path: str, message: Any, headers: dict[str, str] | None = None) -> int:
        kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
        body = message if isinstance(message, bytes) else message.SerializeToString()
        return self.client.post(path, content=body, headers=kind | (headers or {})).status_code


@pytest.fixture
def knocks(here, rogue) -> Knocks:
    rogue.connection().leave()  # the server is there
    return Knocks(here)


def test_calls_without_a_certificate_end_in_the_handshake(here, knocks) -> None:
    before = here.logs()
    trusting = ssl.create_default_context(cafile=here.folder / "keys/ca.pem")
    with pytest.raises(httpx.TransportError):
        httpx.post(f"https://localhost:{here.port}/v1/fleet/pull-messages", verify=trusting)
    here.wait(lambda: "turned away" in here.log(before))


def test_calls_without_a_signature(here, knocks) -> None:
    key = Kit.load(here.folder / f"{ROGUE}.key").key.public_key()
    public = public_key_to_bytes(key)
    activate = ActivateNodeRequest(public_key=public, heartbeat_interval=10)
    assert knocks.post("/v1/fleet/activate-node", activate) == 401
    pull = PullMessagesRequest(node=Node(node_id=1))
    assert knocks.post("/v1/fleet/pull-messages", pull) == 401


@pytest.mark.parametrize(
    "path",
    ["control/list-runs", "control/start-run", "runtime/acquire-task", "fleet/register-node"],
)
def test_what_is_not_for_clients_is_not_there(here, knocks, path) -> None:
    assert knocks.post(f"/v1/{path}", b"") == 404
    assert f"{ROGUE}: refused with 404: '/v1/{path}'" in here.log()


def test_bytes_that_are_no_tls(here, knocks) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03" + os.urandom(1000), os.urandom(100_000)):
        with socket.create_connection(("127.0.0.1", here.port), timeout=30) as knock:
            answer = b""
            with suppress(OSError):
                knock.sendall(data)
                knock.shutdown(socket.SHUT_WR)
                while piece := knock.recv(4096):
                    answer += piece
        assert b" 200 " not in answer


def test_a_request_sent_again(here, rogue, knocks) -> None:
    """Flower signs the time and not the body: TLS is what keeps a signed request from others. Who
    gets one nevertheless needs that client's certificate to use it."""
    headers: dict[str, str] = {}
    connection = rogue.connection()
    hooks = connection.client._client.event_hooks
    signed = ("flwr-public-key", "flwr-signature", "flwr-timestamp")
    connection.client._client.event_hooks = {
        **hooks,
        "request": [lambda r: headers.update({k: r.headers[k] for k in signed})],
    }
    mine = PullMessagesRequest(node=connection.node)
    connection.client.PullMessages(mine)
    assert headers.keys() == {*signed}
    path = "/v1/fleet/pull-messages"
    other = PullMessagesRequest(node=Node(node_id=connection.node.node_id + 1))
    assert knocks.post(path, other, headers) == 401  # not for another client
    later = headers | {"flwr-timestamp": headers["flwr-timestamp"].replace("20", "19", 1)}
    assert knocks.post(path, mine, later) == 401  # not with another time
    assert knocks.post(path, mine, headers | {"flwr-signature": "AAAA"}) == 401
    assert Knocks(here, "poet").post(path, mine, headers) == 401  # not over another's connection
    beat = SendNodeHeartbeatRequest(node=connection.node, heartbeat_interval=10)
    assert knocks.post("/v1/fleet/send-node-heartbeat", beat, headers) == 200  # but another body
    connection.leave()


def test_keys_that_are_not_registered_and_the_end_of_the_run(here, rogue) -> None:
    """After all that, the rogue behaves, and the run ends with everybody."""
    said = here.programs
    reasons = {
        "stranger": "closed the connection",
        "foreigner": "that this key file does not trust; not connected",
    }
    for name, reason in reasons.items():
        here.wait(lambda name=name, reason=reason: reason in said[name].text)
        assert said[name].text.count(reason) == 1  # however often it tries
        assert "connected to" not in said[name].text
        said[name].process.send_signal(signal.SIGINT)
    kit, stop = Kit.load(here.folder / f"{ROGUE}.key"), threading.Event()
    rogue.answers = []
    bound = threading.Timer(180, stop.set)
    bound.start()
    fleet.keep_serving(f"localhost:{here.port}", kit, rogue, stop, lambda *_: None)
    bound.cancel()
    codes = here.ends()
    assert {codes.pop("stranger"), codes.pop("foreigner")} == {130}
    assert set(codes.values()) == {0}
    for name in ("diarist", "poet", "whaler"):
        assert here.counted(name) == [0, 1, 2]
    assert here.counted(ROGUE) == [0, 0, 1, 2]  # that of the wrong shape had come whole
    text = here.programs["server"].text + here.log()
    assert "Traceback" not in text
    assert not list(Path(here.folder).rglob("*.tmp"))

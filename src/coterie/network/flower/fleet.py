"""A client's connection to the server: Flower's fleet API, spoken from the worker's own process.

Flower's own `flower-supernode` starts a process per message and unpacks code that the server sends.
This takes bytes to the worker and nothing else: no code travels, and the base stays in memory.
"""

import logging
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpx
from flwr.app import Message

from coterie.errors import CoterieError
from coterie.messages import MessageError
from coterie.messages.envelope import Order, unseal
from coterie.messages.message import LARGEST_MESSAGE
from coterie.network.flower.parcel import content, fetch, prepare, unpack
from coterie.network.flower.private import (
    CHUNK,
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    ObjectPushError,
    PullMessagesRequest,
    PushMessagesRequest,
    RuntimeVersionHttpInterceptor,
    SendNodeHeartbeatRequest,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    push_objects,
)
from coterie.network.keys import Kit
from coterie.network.link import Seen, Worker
from coterie.network.signature import verified

log = logging.getLogger(__name__)
POLL = 0.5
"""Seconds between two looks for orders."""
HEARTBEAT = 10
"""Seconds that a heartbeat lasts, the least that Flower allows. After two, a client is gone."""
LONGEST_PAUSE = 30.0
"""Seconds between two attempts to reach a server that has been away for long."""
LARGEST_ANSWER = 3 * CHUNK
"""Bytes of an answer to one call: Flower cuts messages into objects of little more than a chunk."""
CLOCKS = 5.0
"""Seconds by which Flower lets a client's clock be ahead of the server's."""


class Cautious(httpx.BaseTransport):
    """HTTPS to the server, whatever it answers: of bounded size, and never unpacked, which could
    make much of little. It goes through the proxy that the environment names, if any."""

    def __init__(self, server: str, context: ssl.SSLContext) -> None:
        host = server.rpartition(":")[0]
        proxy = None if proxy_bypass(host) else getproxies().get("https")
        self.inner = httpx.HTTPTransport(verify=context, proxy=proxy, trust_env=False)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.DecodingError for a compressed answer; reading may raise httpx.ReadError."""
        request.headers["accept-encoding"] = "identity"
        answer = self.inner.handle_request(request)
        if "content-encoding" in answer.headers:
            answer.close()
            raise httpx.DecodingError("the answer is compressed", request=request)
        assert isinstance(answer.stream, httpx.SyncByteStream)
        answer.stream = Bounded(answer.stream)
        return answer

    def close(self) -> None:
        """Close every connection."""
        self.inner.close()


@dataclass(frozen=True)
class Bounded(httpx.SyncByteStream):
    """An answer's bytes, up to `LARGEST_ANSWER`."""

    stream: httpx.SyncByteStream

    def __iter__(self) -> Iterator[bytes]:
        """Raises httpx.ReadError if there are more."""
        left = LARGEST_ANSWER
        for piece in self.stream:
            if (left := left - len(piece)) < 0:
                raise httpx.ReadError("the answer is too large")
            yield piece

    def close(self) -> None:
        """Let the connection go."""
        self.stream.close()


class Fleet(FleetHttpClient):
    """Flower's client, which follows no redirection and survives whatever it is answered."""

    def __init__(self, server: str, kit: Kit) -> None:
        context = kit.context()
        super().__init__(
            f"https://{server}",
            verify=context,  # or it would read the system's authorities, in vain
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(kit.key, kit.key.public_key()),
            ],
        )
        self._client.close()
        cautious = Cautious(server, context)
        self._client = httpx.Client(transport=cautious, timeout=30, trust_env=False)

    def _unary_unary(self, **call: Any) -> Any:
        try:
            return super()._unary_unary(**call)
        except ValueError as error:  # no protobuf
            raise httpx.RemoteProtocolError(str(error)) from error


@dataclass(frozen=True)
class Connection:
    """One life of a connection, from activation to loss."""

    client: FleetHttpClient
    node: Node
    authority: bytes
    """The certificate (PEM) of the authority that the server's is from."""

    def serve(self, worker: Worker, stop: threading.Event) -> None:
        """Answer orders until the stop or the run's end, or an httpx.HTTPError for its loss."""
        beating = threading.Event()
        heart = threading.Thread(target=self._beat, args=(beating,), daemon=True)
        heart.start()
        try:
            while not stop.is_set():
                if not self._one(worker):
                    stop.wait(POLL)
                elif worker.finished:
                    stop.set()
        finally:
            beating.set()

    def leave(self) -> None:
        """Tell the server that this client goes, so that nobody waits for it."""
        try:
            self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        except httpx.HTTPError:
            log.debug("could not notify the server")
        self.client.close()

    def pull(self) -> tuple[Message, bytes] | None:
        """The next order, and its bytes; None if there is none. MessageError if it is not sound."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        run = found.messages_list[0].metadata.run_id
        try:
            order = fetch(
                found.message_object_trees[0],
                make_pull_object_fn_protobuf(self.client.PullObject, self.node, run),
                make_confirm_message_received_fn_protobuf(
                    self.client.ConfirmMessageReceived, self.node, run
                ),
                LARGEST_MESSAGE,
            )
            return order, verified(self.authority, unpack(order))
        except httpx.HTTPError:
            raise
        except Exception as error:  # whatever a server makes Flower's decoder stumble over
            raise MessageError(" ".join(str(error).split())[:300]) from error

    def _one(self, worker: Worker) -> bool:
        """Take one order and push its reply; False if there was none."""
        try:
            if (found := self.pull()) is None:
                return False
            order, asked = found
            reply = Message(content(worker.answer(asked)), reply_to=order)
        except MessageError as error:
            log.error("rejected a message from the server: %s", error)
            return True
        self._push(reply, order.metadata.run_id)
        return True

    def _push(self, reply: Message, run: int) -> None:
        message, tree, objects = prepare(reply)
        pushed = self.client.PushMessages(
            PushMessagesRequest(
                node=self.node,
                messages_list=[message],
                message_object_trees=[tree],
                clientapp_runtime_list=[0.0],
            )
        )
        push_objects(
            objects,
            make_push_object_fn_protobuf(self.client.PushObject, self.node, run, pushed.session_id),
            object_ids_to_push=set(pushed.objects_to_push),
        )

    def _beat(self, stop: threading.Event) -> None:
        """Say now and then that this client is there; what fails, the other thread sees too."""
        beat = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT)
        while not stop.wait(HEARTBEAT / 2):
            try:
                self.client.SendNodeHeartbeat(beat)
            except httpx.HTTPError:
                log.debug("a heartbeat failed")


def connect(server: str, kit: Kit) -> Connection:
    """Reach the server as the client that the kit is for; raises httpx.HTTPError if it cannot."""
    client = Fleet(server, kit)
    request = ActivateNodeRequest(public_key=kit.public, heartbeat_interval=HEARTBEAT)
    try:
        active = client.ActivateNode(request)
    except httpx.HTTPError:
        client.close()
        raise
    return Connection(client, Node(node_id=active.node_id), kit.ca)


def first_order(server: str, kit: Kit, seconds: float) -> Order:
    """The order by which a server asks a client to join, which is left without an answer.

    Raises CoterieError if the server cannot be reached, or asks for nothing within the seconds.
    """
    try:
        connection = connect(server, kit)
    except httpx.HTTPError as error:
        raise CoterieError(f"{_why(server, error)}.") from None
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if (found := connection.pull()) is None:
                time.sleep(POLL)
                continue
            order, _ = unseal(Order, found[1])
            if order.kind == "join":
                return order
    except httpx.HTTPError as error:
        raise CoterieError(f"{_why(server, error)}.") from None
    finally:
        connection.leave()
    raise CoterieError(
        f"{server} lets {kit.name} in, but did not ask it to join a run; is it among the run "
        "file's clients?"
    )


def keep_serving(server: str, kit: Kit, worker: Worker, stop: threading.Event, seen: Seen) -> None:
    """Be there for the server until the run's end, whatever becomes of the network or of it.

    The kit is read again for each connection, so that a renewed one can take its place. `stop`
    ends it sooner.
    """
    with ExitStack() as last:  # until it has left, or two heartbeats, no other is let in
        pause, away = 1.0, ""
        while not stop.is_set():
            began = time.monotonic()
            try:
                last.close()
                connection = connect(server, kit.again())
                last.callback(connection.leave)
                away = ""
                seen("connected", server)
                connection.serve(worker, stop)
            except (httpx.HTTPError, ObjectPushError, CoterieError) as error:
                if (why := _why(server, error)) != away:
                    away = why
                    seen("away", why)
                if time.monotonic() - began > LONGEST_PAUSE:  # it held: begin with short pauses
                    pause = 1.0
                stop.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        if worker.finished:  # Flower would throw away a last reply that the server has yet to take
            last.pop_all()


def _why(server: str, error: Exception) -> str:
    """Why the server cannot be reached, for people."""
    if isinstance(error, ObjectPushError):
        return f"{server} stopped waiting for this client's reply"
    if isinstance(error, CoterieError):  # about the kit
        return str(error).rstrip(".")
    if isinstance(error, httpx.HTTPStatusError):
        return _status(server, error.response)
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"{server} {_certificate(text)}; not connected"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return (
            f"{server} closed the connection; if this repeats, the server has removed or renewed "
            "this key, and a new key file is needed"
        )
    return f"{server} is unreachable"


def _certificate(text: str) -> str:
    """What is wrong with a server's certificate, by what TLS says."""
    now = f"by this machine's clock, which says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    if "has expired" in text:
        return f"has a certificate that has expired, {now}"
    if "not yet valid" in text:
        return f"has a certificate that is not valid yet, {now}"
    if "mismatch" in text:
        return (
            "is not among the names in its server's certificate, which `coterie keys certify "
            "--host` adds there"
        )
    return "has a certificate from an authority that this key file does not trust"


def _status(server: str, response: httpx.Response) -> str:
    """What a refusal means."""
    if response.status_code not in (401, 412):
        return f"{server} responded with status {response.status_code}"
    try:
        there = parsedate_to_datetime(response.headers["date"])
        ahead = (datetime.now(UTC) - there).total_seconds()
    except (KeyError, ValueError, TypeError):
        ahead = 0.0
    if ahead > CLOCKS or ahead < -60 * CLOCKS:
        which = "ahead of" if ahead > 0 else "behind"
        return f"this machine's clock is {abs(ahead):.0f} seconds {which} that of {server}; set it"
    return f"{server} still has an open connection with this key"

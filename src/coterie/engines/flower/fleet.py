"""A client's connection to the server: Flower's fleet API, spoken from the worker's own process.

Flower's own `flower-supernode` starts a process per message and unpacks code that the server sends.
This takes bytes to the worker and nothing else: no code travels, and the base stays in memory.
"""

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
from flwr.app import Message

from coterie.engines.deployed.client import Seen, Worker
from coterie.engines.flower.keys import Kit
from coterie.engines.flower.parcel import content, fetch, prepare, unpack
from coterie.engines.flower.private import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    FleetHttpClient,
    Node,
    NodeAuthHttpInterceptor,
    ObjectPullError,
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
from coterie.exchange import MessageError
from coterie.exchange.message import LARGEST_MESSAGE

log = logging.getLogger(__name__)
POLL = 0.5
"""Seconds between two looks for orders."""
HEARTBEAT = 10
"""Seconds that a heartbeat lasts, the least that Flower allows. After two, a client is gone."""
LONGEST_PAUSE = 30.0
"""Seconds between two attempts to reach a server that has been away for long."""


@dataclass(frozen=True)
class Connection:
    """One life of a connection, from activation to loss."""

    client: FleetHttpClient
    node: Node

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

    def _one(self, worker: Worker) -> bool:
        """Take one order and push its reply; False if there was none."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return False
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
            reply = Message(content(worker.answer(unpack(order))), reply_to=order)
        except (MessageError, ObjectPullError) as error:
            log.error("rejected a message from the server: %s", error)
            return True
        self._push(reply, run)
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
    client = FleetHttpClient.from_server_address(
        server,
        insecure=False,
        root_certificates=kit.ca,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(kit.key, kit.key.public_key()),
        ],
    )
    request = ActivateNodeRequest(public_key=kit.public, heartbeat_interval=HEARTBEAT)
    try:
        active = client.ActivateNode(request)
    except httpx.HTTPError:
        client.close()
        raise
    return Connection(client, Node(node_id=active.node_id))


def keep_serving(server: str, kit: Kit, worker: Worker, stop: threading.Event, seen: Seen) -> None:
    """Be there for the server until the run's end, whatever becomes of the network or of it.

    `stop` ends it sooner.
    """
    with ExitStack() as last:  # until it has left, or two heartbeats, no other is let in
        pause, away = 1.0, ""
        while not stop.is_set():
            began = time.monotonic()
            try:
                last.close()
                connection = connect(server, kit)
                last.callback(connection.leave)
                away = ""
                seen("connected", server)
                connection.serve(worker, stop)
            except (httpx.HTTPError, ObjectPushError) as error:
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
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"{server} has a certificate from an authority that this kit does not trust; not "
            "connected"
        )
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code in (401, 412):
            return f"{server} rejected this key, or still has an open connection with it"
        return f"{server} responded with status {error.response.status_code}"
    return f"{server} is unreachable"

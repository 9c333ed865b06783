"""The server's side of the network: Flower's SuperLink on loopback, the door before it, and a run.

Flower carries messages between this process, which plays its ServerApp, and clients. Of the bundle
of code that Flower wants for a run nothing is ever executed: ours is empty.
"""

import hashlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from flwr.app import Message

from coterie.errors import CoterieError
from coterie.files import append_to, refuse_links, write_private
from coterie.network.door import Settings
from coterie.network.door_process import DoorProcess, die_with_parent
from coterie.network.flower import FLOWER
from coterie.network.flower.parcel import content, fetch, prepare, unpack
from coterie.network.flower.private import (
    CHUNK,
    SUPERLINK,
    SUPERLINK_NODE_ID,
    AcquireTaskRequest,
    CliClientHttpInterceptor,
    ControlHttpClient,
    Fab,
    GetNodesRequest,
    HeartbeatSender,
    ListFederationsRequest,
    Node,
    ObjectTree,
    ObjectUnavailableError,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    RegisterNodeRequest,
    RuntimeHttpClient,
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    StartRunRequest,
    SuperExecAuthHttpInterceptor,
    TaskIdentity,
    TaskType,
    build_fab_from_files,
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
    make_task_heartbeat_fn_http,
    push_objects,
)
from coterie.network.keys import Keys
from coterie.network.link import LONGEST_LINE
from coterie.network.signature import signed

log = logging.getLogger(__name__)
POLL = 0.3
"""Seconds between two looks at who is there and what has come."""
START_SECONDS = 60
BUNDLE = {
    "LICENSE": b"None needed.\n",
    "empty.py": b"",
    "pyproject.toml": b"""[project]
name = "coterie"
version = "1.0.0"
description = "No code: clients run the package that is installed where they are."
license = {file = "LICENSE"}
dependencies = ["flwr>=%s"]
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "empty:none"
clientapp = "empty:none"
[tool.flwr.app.config]
"""
    % FLOWER.encode(),
}


class SuperLink:
    """Flower's server as a child process, behind the door, from `with` to the end of its block.

    Its data are in memory: a run that goes on after a stop is a new run of Flower's. Its
    certificate is made anew each time and for loopback alone; what clients see is the door's.
    """

    def __init__(self, folder: Path, keys: Keys, address: str, largest: int) -> None:
        """largest: bytes of a message."""
        self.folder, self.keys = folder, keys
        self.port = _free_port()
        self.local = f"127.0.0.1:{self.port}"
        self.secret = secrets.token_bytes(32)
        self._open = ExitStack()
        settings = Settings(
            keys=str(keys.folder),
            superlink=self.port,
            authority=str(folder / "loopback" / "ca.pem"),
            request_bytes=2 * CHUNK,
            order_bytes=2 * largest + CHUNK,  # a reply, and once more if its connection breaks
            log=str(folder / "door.log"),
        )
        self.door = DoorProcess(address, settings)

    def __enter__(self) -> Self:
        """Start both, and wait until they listen; raises CoterieError if they do not."""
        refuse_links(self.folder.parent, self.folder.name)
        for name in ("loopback", "door.log", "superlink.log"):
            refuse_links(self.folder, name)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_private(self.folder / "secret", self.secret)
        shutil.rmtree(self.folder / "loopback", ignore_errors=True)
        loopback = Keys.create(self.folder / "loopback")
        self.authority = loopback.ca.read_bytes()
        try:
            self.process = self._start(loopback)
            self._open.callback(self._stop)
            self.control = ControlHttpClient.from_server_address(
                self.local,
                insecure=False,
                root_certificates=self.authority,
                interceptors=[
                    RuntimeVersionHttpInterceptor(component_name="flwr"),
                    CliClientHttpInterceptor(),
                ],
            )
            self._wait()
            self._open.enter_context(self.door)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop both."""
        self._open.close()

    def _start(self, keys: Keys) -> "subprocess.Popen[bytes]":
        command = [
            *(sys.executable, "-c", SUPERLINK),
            *("--host", "127.0.0.1", "--port", str(self.port), "--isolation", "process"),
            *("--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)),
            *("--ssl-keyfile", str(keys.key), "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
            *("--superexec-auth-secret-file", str(self.folder / "secret")),
        ]
        with append_to(self.folder / "superlink.log") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then stops it
                preexec_fn=die_with_parent(),
                env={**os.environ, "FLWR_HOME": str(self.folder.resolve())},
            )

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                self.control.ListFederations(ListFederationsRequest())
                return
            except httpx.HTTPError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise CoterieError(
                        f"Flower's SuperLink did not start; see {self.folder / 'superlink.log'}."
                    ) from None
                time.sleep(0.1)

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class NotWhole(Exception):
    """A reply is still under way."""

    def __init__(self, missing: str) -> None:
        self.missing = missing


def at_once(pull: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Flower's way to get an object, without its waiting for one that is not there yet."""

    def get(object_id: str) -> bytes:
        try:
            return pull(object_id)
        except ObjectUnavailableError:
            raise NotWhole(object_id) from None

    return get


class FlowerLink:
    """Clients by the names of their keys, over a run on a SuperLink: a `network.link.Link`."""

    def __init__(self, superlink: SuperLink, largest: int) -> None:
        self.superlink, self.largest = superlink, largest
        self.registered: set[bytes] = set()
        self.names: dict[bytes, str] = {}
        self.unread = ""
        """Why the keys could not be read the last time."""
        self.nodes: dict[str, int] = {}
        self.coming: dict[str, tuple[ObjectTree, str | None]] = {}
        """Replies by their tickets that were not whole, and an object that each lacked."""
        self._register()
        fab, _ = build_fab_from_files(BUNDLE)
        bundle = Fab(hash_str=hashlib.sha256(fab).hexdigest(), content=fab)
        superlink.control.StartRun(StartRunRequest(fab=bundle))
        self.runtime = self._task()
        given = self.runtime.PullTaskInput(PullTaskInputRequest())
        # What Flower puts into the metadata of messages that this process makes.
        TaskIdentity.task_id, TaskIdentity.node_id = given.task_id, given.context.node_id
        self.run = TaskIdentity.run_id = given.run.run_id
        self.node = Node(node_id=SUPERLINK_NODE_ID)
        HeartbeatSender(make_task_heartbeat_fn_http(self.runtime)).start()

    def present(self) -> dict[str, str]:
        """The registered clients that are connected, and since when."""
        names = self._register()
        found = {}
        for node in self.runtime.GetNodes(GetNodesRequest()).nodes:
            if (name := names.get(node.public_key)) is not None:
                self.nodes[name] = node.node_id
                found[name] = node.last_activated_at
        return found

    def send(self, client: str, data: bytes, round: int, seconds: float) -> str:
        """See `Link`."""
        order = content(signed(self.superlink.keys, data))
        message = Message(order, self.nodes[client], "train", ttl=seconds, group_id=str(round))
        proto, tree, objects = prepare(message)
        self.superlink.door.ordered(client)
        pushed = self.runtime.PushMessages(
            PushAppMessagesRequest(messages_list=[proto], message_object_trees=[tree])
        )
        push = make_push_object_fn_protobuf(
            self.runtime.PushObject, self.node, self.run, pushed.session_id
        )
        push_objects(objects, push, object_ids_to_push=set(pushed.objects_to_push))
        return pushed.message_ids[0]

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `Link`; one at a time, so that memory holds one.

        Flower tells of a reply when its first byte is under way; one that is not whole yet is
        looked at again the next time, so that nobody waits for a client that is slow to send.
        """
        for ticket in tickets:
            if ticket not in self.coming:
                found = self.runtime.PullMessages(PullAppMessagesRequest(message_ids=[ticket]))
                for proto, tree in zip(
                    found.messages_list, found.message_object_trees, strict=True
                ):
                    if proto.metadata.reply_to_message_id == ticket:
                        self.coming[ticket] = tree, None
            if ticket in self.coming:
                tree, missing = self.coming[ticket]
                try:
                    data = self._fetched(tree, missing)
                except NotWhole as error:
                    self.coming[ticket] = tree, error.missing
                else:
                    del self.coming[ticket]
                    yield ticket, data

    def wait(self) -> None:
        """See `Link`."""
        if self.superlink.process.poll() is not None:
            raise CoterieError("Flower's SuperLink has stopped; continue with --resume.")
        if not self.superlink.door.alive:
            raise CoterieError(
                "The program that lets clients in has stopped; continue with --resume."
            )
        time.sleep(POLL)

    def _fetched(self, tree: ObjectTree, missing: str | None) -> bytes | None:
        """The bytes of a reply; None if it is refused. Raises NotWhole.

        missing: an object of it that was not there when it was last looked at.
        """
        pull = at_once(make_pull_object_fn_protobuf(self.runtime.PullObject, self.node, self.run))
        confirm = make_confirm_message_received_fn_protobuf(
            self.runtime.ConfirmMessageReceived, self.node, self.run
        )
        try:
            if missing is not None:
                pull(missing)
            message = fetch(tree, pull, confirm, self.largest)
            if message.has_error():  # Flower's own word that the client is gone
                return None
            return unpack(message)
        except (NotWhole, httpx.HTTPError):
            raise
        except Exception as error:  # whatever a client makes Flower's decoder stumble over
            log.warning("rejected a message: %s", " ".join(str(error).split())[:LONGEST_LINE])
            return None

    def _register(self) -> dict[bytes, str]:
        """Names by key; the SuperLink learns of keys that were added meanwhile."""
        try:
            clients = self.superlink.keys.clients()
        except (CoterieError, OSError) as error:  # until they can be read, the old ones hold
            if str(error) != self.unread:
                log.warning("could not read the keys: %s", error)
            self.unread = str(error)
            return self.names
        self.unread = ""
        self.names = {about.public: name for name, about in clients.items()}
        for key in self.names.keys() - self.registered:
            request = RegisterNodeRequest(public_key=key, name=self.names[key])
            self.superlink.control.RegisterNode(request)
            self.registered.add(key)
        return self.names

    def _task(self) -> RuntimeHttpClient:
        """Take on the run's server task, which is otherwise a process of Flower's."""
        acquire = self._client(
            SuperExecAuthHttpInterceptor(
                master_secret=self.superlink.secret,
                protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
            )
        )
        task = acquire.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        acquire.close()
        return self._client(RuntimeTokenHttpInterceptor(task.token))

    def _client(
        self, interceptor: RuntimeTokenHttpInterceptor | SuperExecAuthHttpInterceptor
    ) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self.superlink.local,
            insecure=False,
            root_certificates=self.superlink.authority,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), interceptor],
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

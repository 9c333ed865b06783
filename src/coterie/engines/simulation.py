"""The engine `flower-simulation`: the round loop with clients in several processes.

Clients work in Flower's simulation engine. The Ray backend of this engine has a pool of processes,
the actors. Each actor executes the order for one client at a time as a ClientApp. The round loop
and the server are in this process. Between orders, an actor keeps only the bases and all clients'
texts; for each order, the actor creates the client again. A client's step starts from the newest
checkpoint and writes the client's new state to the folder `states`, from which the next checkpoint
is written. So a round that is repeated after a crash gives the same result, whichever actors
execute it.

Orders and answers consist of bytes and small values, and messages are safetensors as in other
engines. Flower's objects contain these messages, and Ray pickles the objects to move them between
processes. The objects stay on this machine's loopback interface, where Ray accepts only connections
with this run's token.
"""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Ray reads these variables when it is imported. Despite its name, the second variable also makes
# Ray on Linux bind to the loopback interface instead of all interfaces.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # actors see the GPU that this process sees
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # actors inherit the token

import ray
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from coterie.bases import Bases, load_tokenizer
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.engines.clients import Clients, Download
from coterie.engines.local import LocalClients
from coterie.engines.runtime import ClientPart
from coterie.errors import CoterieError, Diverged
from coterie.federation.participants import participants_of
from coterie.messages import Json
from coterie.network.flower.private import SUPERLINK_NODE_ID, RayBackend, TaskIdentity
from coterie.runs import Recorder, RunFolder
from coterie.runs.progress import logged
from coterie.training.context import ClientId

log = logging.getLogger(__name__)
LOG = "simulation.log"
"""The file in the run folder with the log messages of Flower and Ray."""
STORE = 2**27
"""The size of Ray's shared memory for messages, in bytes. Ray moves messages to disk if they do not
fit into this memory."""
RAY_FOLDER = os.environ.get("RAY_TMPDIR", "/tmp")
"""The folder of Ray's logs and sockets. A socket's path has at most about 100 characters."""
RECORD = "coterie"
Order = dict[str, Any]
"""An order to a client: the run folder, the plugins, the client's name, whether the client's last
upload was accepted, the action `do` (hello, step, undo or finish), the exchange's number, and the
download."""
Answer = dict[str, Any]
"""A client's answer: the upload or hello, the metrics in JSON, and the error if there was one."""
Metric = dict[str, Json]
"""The arguments of `Recorder.log`; the keys are the names of the parameters."""


class SimulatedClients(Clients):
    """Clients in a pool of processes; the number of processors limits the number of processes."""

    in_process = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        self.actors = max(1, min((os.cpu_count() or 1) // threads, len(self.participants)))
        with (
            logged(self.folder.path / LOG, "flwr", "ray", log.name),
            super().at_work(),
            _actors(self.actors, threads) as self.ask,
        ):
            yield

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        for name, answer in self._all(self.participants, "hello", 0, lambda name: b"", ()):
            yield name, answer["body"]

    def step(
        self, round: int, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        for name, answer in self._all(names, "step", round, download, lost):
            yield name, Diverged(answer["diverged"]) if answer["diverged"] else answer["body"]

    def finish(self, round: int, download: Download, lost: Collection[ClientId]) -> None:
        deque(self._all(self.participants, "finish", round, download, lost), maxlen=0)

    def undo(self, name: ClientId) -> None:
        deque(self._all([name], "undo", 0, lambda name: b"", ()), maxlen=0)

    def restore(self) -> None:
        pass  # actors start each step from the newest checkpoint

    def covered(self) -> set[tuple[str, ...]]:
        # Only the first client's base is in this process.
        first = next(iter(self.participants.values()))
        return {ClientPart(self.config, self.base, first, Recorder(lambda *_: None)).covered}

    def _all(
        self,
        names: Iterable[ClientId],
        do: str,
        round: int,
        download: Download,
        lost: Collection[ClientId],
    ) -> Iterator[tuple[ClientId, Answer]]:
        """Send the same order to several clients.

        At most two orders per actor are pending, so that downloads do not fill the memory.

        Yields:
            The name and the answer of each client, in the order of `names`.
        """
        waiting: deque[tuple[ClientId, Future[Answer]]] = deque()
        for name in names:
            if len(waiting) == 2 * self.actors:
                yield self._answered(*waiting.popleft())
            run, body = str(self.folder.path.resolve()), download(name)
            order = {"run": run, "client": name, "do": do, "round": round, "body": body}
            order["counted"] = name not in lost
            order["plugins"] = json.dumps(self.config.plugins)
            waiting.append((name, self.ask(order)))
        while waiting:
            yield self._answered(*waiting.popleft())

    def _answered(self, name: ClientId, future: "Future[Answer]") -> tuple[ClientId, Answer]:
        """Wait for a client's answer, and record the metrics that it contains."""
        try:
            answer = future.result()
        except Exception as error:  # any error in the actor, including its death
            log.exception("client %s failed", name)
            raise CoterieError(f"Client {name!r} failed; see {self.folder.path / LOG}.") from error
        if answer["complaint"]:
            raise CoterieError(answer["complaint"])
        for metric in json.loads(answer["entries"]):
            self.recorder.log(**metric)
        return name, answer


@contextmanager
def _actors(count: int, threads: int) -> Iterator[Callable[[Order], "Future[Answer]"]]:
    """Start actors, and stop them at the end of the body of the with statement.

    On Linux, Ray's processes end when the thread that entered the with statement ends.

    Args:
        count: The number of actors.
        threads: The number of threads of each actor.

    Yields:
        A function that sends an order to the next free actor.
    """
    TaskIdentity.task_id = TaskIdentity.run_id = 1  # required in Flower's messages
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    actors: list[Any] = []
    with (
        TemporaryDirectory(prefix="coterie-", dir=RAY_FOLDER, ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(count) as waiters,  # one for each actor
    ):
        try:
            ray.init(
                address="local",
                num_cpus=count * threads,
                object_store_memory=STORE,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=folder,
            )
            backend = RayBackend({"client_resources": {"num_cpus": threads}})
            backend.build(client_app)
            assert backend.pool is not None
            actors += backend.pool.pool
            yield lambda order: waiters.submit(_ask, backend, order)
        finally:
            waiters.shutdown(wait=False, cancel_futures=True)
            for actor in actors:
                ray.kill(actor)
            waiters.shutdown()  # threads notice that their actors are dead; this needs Ray
            ray.shutdown()


def _ask(backend: RayBackend, order: Order) -> Answer:
    """Execute an order in the next free actor."""
    content = RecordDict({RECORD: ConfigRecord(order)})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    reply, _ = backend.process_message(Message(content, 1, MessageType.QUERY), context)
    return dict(reply.content.config_records[RECORD])


app = ClientApp()


def client_app() -> ClientApp:
    """Return the app that actors run. Ray passes only this function's name to the actors."""
    return app


@app.query()
def obey(message: Message, context: Context) -> Message:
    """Execute an order in an actor's process.

    Args:
        message: The message with the order.
        context: The context that Flower passes.

    Returns:
        The message with the answer.
    """
    order: Order = dict(message.content.config_records[RECORD])
    answer: Answer = {"body": b"", "entries": "[]", "diverged": "", "complaint": ""}
    try:
        body, entries = _actor(order.pop("run"), order.pop("plugins")).work(**order)
        diverged = isinstance(body, Diverged)
        answer |= {"diverged": str(body)} if diverged else {"body": body}
        answer["entries"] = json.dumps(entries)
    except CoterieError as error:
        answer["complaint"] = str(error)
    return Message(RecordDict({RECORD: ConfigRecord(answer)}), reply_to=message)


@cache
def _actor(run: str, plugins: str) -> "Actor":
    for plugin in json.loads(plugins).values():
        load_plugin(plugin["file"], expected=plugin["sha256"])
    return Actor(RunFolder(Path(run)))


class Actor:
    """The state of an actor's process between orders: a run with its bases and its participants.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, described = folder, folder.description
        torch.set_num_threads(described["threads"])
        self.config = config = parse(described["config"])
        self.bases = Bases(
            config.training.precision, config.data.window, config.root, config.device
        )
        words = load_tokenizer(config.base, config.root)
        self.participants = {p.name: p for p in participants_of(config, words)}

    def work(
        self, *, do: str, client: ClientId, round: int, counted: bool, body: bytes
    ) -> tuple[bytes | Diverged, list[Metric]]:
        """Execute an order.

        Args:
            do: The action: `hello`, `step`, `undo` or `finish`.
            client: The client's name.
            round: The number of the exchange; the first is 0.
            counted: Whether the client's last upload was accepted.
            body: The download.

        Returns:
            The hello or the upload (or the error, if the client diverged), and the metrics that
            were recorded.
        """
        base, metrics = self.bases[self.config.base_of(client)], Metrics(lambda *_: None)
        alone = {client: self.participants[client]}
        clients = LocalClients(self.config, base, alone, self.folder, metrics)
        lost = () if counted else (client,)
        upload: bytes | Diverged = b""
        if do == "hello":
            [(_, upload)] = clients.hellos()
        elif do == "step":
            [(_, upload)] = clients.step(round, [client], lambda _: body, lost)
            clients.part(client).keep_items(self.folder)
        elif do == "undo":
            clients.undo(client)
        else:
            clients.finish(round, lambda _: body, lost)
        if do != "hello":
            clients.new.put(clients.part(client))
        self.participants |= clients.participants  # keep references, which are slow to compute
        return upload, metrics.take()


class Metrics(Recorder):
    """A recorder that collects metrics for the main process."""

    def log(self, client: str | None, name: str, value: Json, round: int | None = None) -> None:
        self._lines.append({"client": client, "name": name, "value": value, "round": round})

"""The engine flower-simulation: the local engine's rounds, with clients in several processes.

Flower's simulation engine does the clients' work: its Ray backend keeps a pool of processes, the
actors, and each carries out one client's order at a time, as a ClientApp. The rounds and the server
are in this process. An actor keeps the base and everybody's text between orders and nothing else: a
client is made anew for each. Its step begins at the newest checkpoint and leaves the state in the
folder `states`, which becomes the next checkpoint, so a round that is repeated after a kill is the
same round, whichever actors work.

Orders and answers are bytes and small values, messages are safetensors as everywhere. Ray itself
pickles Flower's objects around them to move them between its own processes: that stays on this
machine, on the loopback interface, where Ray answers to nobody without this run's token.
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

# Ray reads these when it is imported. The second is its own name for: on loopback, not on every
# interface, as on systems other than Linux.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # actors see the GPU that this process sees
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # an actor finds it set

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
"""In the run's folder: what Flower and Ray say."""
STORE = 2**27
"""Bytes of shared memory for messages under way; Ray moves what is more to disk."""
PLACE = os.environ.get("RAY_TMPDIR", "/tmp")
"""For Ray's sockets, whose paths may not be long, and its own logs."""
RECORD = "coterie"
Order = dict[str, Any]
"""The run's folder and plugins, the client, what to do (hello, step, undo or finish), the round
and a download."""
Answer = dict[str, Any]
"""The upload or hello, and entries in JSON; why the client diverged, if it did; or a complaint."""
Figure = dict[str, Json]
"""What `Recorder.log` is given, by name."""


class SimulatedClients(Clients):
    """Clients in as many processes as this machine has processors for."""

    in_process = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Start the processes, which end with the block."""
        threads = torch.get_num_threads()
        self.actors = max(1, min((os.cpu_count() or 1) // threads, len(self.participants)))
        with (
            logged(self.folder.path / LOG, "flwr", "ray", log.name),
            super().at_work(),
            _actors(self.actors, threads) as self.ask,
        ):
            yield

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        """See `Clients`."""
        for name, answer in self._all(self.participants, "hello", 0, lambda name: b"", ()):
            yield name, answer["body"]

    def step(
        self, round: int, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        """See `Clients`; they work side by side."""
        for name, answer in self._all(names, "step", round, download, lost):
            yield name, Diverged(answer["diverged"]) if answer["diverged"] else answer["body"]

    def finish(self, round: int, download: Download, lost: Collection[ClientId]) -> None:
        """See `Clients`."""
        deque(self._all(self.participants, "finish", round, download, lost), maxlen=0)

    def undo(self, name: ClientId) -> None:
        """See `Clients`."""
        deque(self._all([name], "undo", 0, lambda name: b"", ()), maxlen=0)

    def restore(self) -> None:
        """Do nothing: a step begins at the newest checkpoint as it is."""

    def covered(self) -> set[tuple[str, ...]]:
        """Return the layers of the first client's base, as the others are in other processes."""
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
        """Give clients the same order; yield what each answers, in the order of `names`.

        Downloads are made when an actor is about to be free, so that they do not fill the memory.
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
        """Return a client's answer, and record its figures."""
        try:
            answer = future.result()
        except Exception as error:  # whatever happened in the actor, or to it
            log.exception("client %s failed", name)
            raise CoterieError(f"Client {name!r} failed; see {self.folder.path / LOG}.") from error
        if answer["complaint"]:
            raise CoterieError(answer["complaint"])
        for figure in json.loads(answer["entries"]):
            self.recorder.log(**figure)
        return name, answer


@contextmanager
def _actors(count: int, threads: int) -> Iterator[Callable[[Order], "Future[Answer]"]]:
    """Processes of `threads` threads that carry out orders until the block ends, however it does.

    Enter it from a thread that lives as long as it should: on Linux, Ray ends with that thread.
    """
    TaskIdentity.task_id = TaskIdentity.run_id = 1  # Flower's messages must bear some
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    actors: list[Any] = []
    with (
        TemporaryDirectory(prefix="coterie-", dir=PLACE, ignore_cleanup_errors=True) as place,
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
                _temp_dir=place,
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
            waiters.shutdown()  # they see that their actors are gone, and Ray is still there
            ray.shutdown()


def _ask(backend: RayBackend, order: Order) -> Answer:
    """Have the next free actor carry out an order."""
    content = RecordDict({RECORD: ConfigRecord(order)})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    reply, _ = backend.process_message(Message(content, 1, MessageType.QUERY), context)
    return dict(reply.content.config_records[RECORD])


app = ClientApp()


def client_app() -> ClientApp:
    """What actors run; Ray passes this function on by its name."""
    return app


@app.query()
def obey(message: Message, context: Context) -> Message:
    """Carry out an order, in an actor's process."""
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
    """What an actor's process keeps between orders: the run, bases and who takes part."""

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
    ) -> tuple[bytes | Diverged, list[Figure]]:
        """One order's answer and the figures that were logged meanwhile."""
        base, figures = self.bases[self.config.base_of(client)], Figures(lambda *_: None)
        alone = {client: self.participants[client]}
        clients = LocalClients(self.config, base, alone, self.folder, figures)
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
        self.participants |= clients.participants  # what they know takes time to compute
        return upload, figures.take()


class Figures(Recorder):
    """Figures on their way to the process that records them."""

    def log(self, client: str | None, name: str, value: Json, round: int | None = None) -> None:
        """See `Recorder`."""
        self._lines.append({"client": client, "name": name, "value": value, "round": round})

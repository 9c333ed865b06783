"""The engine `ray`: the round loop with clients in several processes, on one machine or a cluster.

Clients work in Ray actors, the workers; the round loop and the server are in this process. A worker
executes one order at a time, for any client, and keeps only the bases and all clients' texts
between orders. Each order and each answer contains the client's state. Between orders, the state is
stored in the folder `states`, from which the next checkpoint is written. If a worker is lost,
another worker therefore executes the lost worker's order again, with the same result.

Orders and answers consist of bytes and small values, and messages are safetensors as in other
engines. Ray pickles orders, answers and texts to move them between processes. Anyone who can
connect to Ray can therefore execute code in Ray's processes; see `set_variables`.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from coterie.bases import Bases
from coterie.bases.devices import Device
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.engines.client_host import ClientHost
from coterie.engines.clients import Clients, Download, decoded, encoded
from coterie.engines.cluster import check_address, connected, places, processors, share
from coterie.errors import CoterieError, Diverged, plural
from coterie.federation.sizes import check_messages, message_sizes
from coterie.messages.names import BYTES_DOWN
from coterie.runs import Recorder
from coterie.runs.progress import logged
from coterie.training.context import ClientId
from coterie.turn import FIRST, Turn

log = logging.getLogger(__name__)
LOG = "ray.log"
"""The file in the run folder with the log messages of this module and Ray."""
TRIES = 3
"""The number of workers, lost one after another during one order, after which the run stops."""
CHECK = 5.0
"""The number of seconds without an answer after which the cluster is checked."""
START = 300.0
"""The number of seconds after which the run stops if no worker has started."""


class Order(NamedTuple):
    """An order to a client."""

    client: ClientId
    do: str
    """The action: `hello`, `step`, `undo` (return to the state in the order) or `finish`."""
    turn: Turn
    counted: bool
    """Whether the client's last upload was accepted."""
    download: bytes
    state: bytes | None
    """The client's newest state; None for the initial state."""
    kept: bytes | None
    """The newest state of the client's best model; None if there is none."""


class Answer(NamedTuple):
    """The answer of a client to an order."""

    message: bytes | Diverged
    """The upload (for `hello` and `undo`, the first message), or the error if it diverged."""
    metrics: Sequence[Mapping[str, Any]] = ()
    """The lines of the recorder."""
    states: Sequence[tuple[str, bytes]] = ()
    """The client's new states, as in `NewStates.put`."""
    scores: Sequence[tuple[Any, ...]] = ()
    """The arguments of `RunFolder.keep_items` for each text that was scored."""
    covered: tuple[str, ...] = ()
    """For `hello`: lines of text that describe the layers that the adapter modifies."""


@dataclass(eq=False)
class RayClients(Clients):
    """Clients in Ray's workers.

    Args:
        address: The HOST:PORT of a running cluster; None: start Ray on this machine.
        gpus: The number of GPUs per worker, which may be a fraction. None: derived from the run's
            `device`; see `cluster.share`.
    """

    address: str | None = None
    gpus: float | None = None
    in_process = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with logged(self.folder.path / LOG, "ray", log.name), super().at_work():
            threads = torch.get_num_threads()
            most = max(1, min(processors() // threads, len(self.participants)))
            with connected(self.address, most * threads):
                try:
                    self.pool = self._pool(threads)
                    yield
                except RayError as error:
                    log.exception("Ray failed")
                    raise CoterieError(
                        f"Ray failed ({type(error).__name__}; see {LOG} in the run folder); "
                        "continue the run with --resume."
                    ) from error

    def _pool(self, threads: int) -> "Pool":
        gpus, device = share(self.config.device, self.gpus)
        size = min(places(threads, gpus), len(self.participants))
        if not size:
            needed = plural(threads, "processor") + (f" and {gpus:g} GPUs" if gpus else "")
            raise CoterieError(
                f"No machine has the {needed} that a worker needs; lower `threads` or --gpus."
            )
        texts = ray.put({name: replace(p, base=None) for name, p in self.participants.items()})
        # Ray does not resolve a reference inside a list, so that a worker loads the plugins before
        # it unpickles the texts.
        plan = self.config.as_dict(), self.config.plugins, threads, device, [texts]
        kind: Any = ray.remote(num_cpus=threads, num_gpus=gpus)(Worker)

        def start() -> tuple[Any, Any]:
            worker = kind.remote()
            return worker, worker.begin.remote(*plan)

        return Pool(start, size)

    def hellos(self) -> Iterator[tuple[ClientId, bytes]]:
        self._covered: set[tuple[str, ...]] = set()
        for name, answer in self._all(self.participants, "hello"):
            self._covered.add(answer.covered)
            assert isinstance(answer.message, bytes)
            yield name, answer.message

    def step(
        self, turn: Turn, names: Sequence[ClientId], download: Download, lost: Collection[ClientId]
    ) -> Iterator[tuple[ClientId, bytes | Diverged]]:
        for name, answer in self._all(names, "step", turn, download, lost):
            yield name, answer.message

    def finish(self, turn: Turn, download: Download, lost: Collection[ClientId]) -> None:
        deque(self._all(self.participants, "finish", turn, download, lost), maxlen=0)

    def undo(self, name: ClientId) -> None:
        self.new.drop(name)
        deque(self._all([name], "undo"), maxlen=0)

    def restore(self) -> None:
        pass  # each order contains the newest state

    def covered(self) -> set[tuple[str, ...]]:
        return self._covered

    def _all(
        self,
        names: Iterable[ClientId],
        do: str,
        turn: Turn = FIRST,
        download: Download = lambda name: b"",
        lost: Collection[ClientId] = (),
    ) -> Iterator[tuple[ClientId, Answer]]:
        """Send the same order to several clients, and record their metrics, scores and states.

        Yields:
            The name and the answer of each client, in the order of `names`.
        """

        def order(name: ClientId) -> Order:
            newest = (None, None) if do == "hello" else self.new.newest(name)
            return Order(name, do, turn, name not in lost, download(name), *newest)

        names = list(names)
        for name, answer in zip(names, self.pool.answers(map(order, names)), strict=True):
            for line in answer.metrics:
                self.recorder.log(line["client"], line["name"], line["value"], line["round"])
            for scores in answer.scores:
                self.folder.keep_items(*scores)
            self.new.put(answer.states)
            yield name, answer


class Pool:
    """Workers, each of which executes one order at a time.

    Args:
        start: A function that starts a worker; it returns the worker, and a reference that becomes
            ready when the worker has started.
        size: The number of workers.
    """

    def __init__(self, start: Callable[[], tuple[Any, Any]], size: int) -> None:
        self._start, self.size = start, size
        self._idle: list[Any] = []
        self._tasks: dict[Any, tuple[Any, int | None]] = {}
        """The worker and the order's number, by the reference to the answer.

        While a worker starts, the number is None.
        """
        self._losses: Counter[int | None] = Counter()
        for _ in range(size):
            self._begin()

    def _begin(self) -> None:
        worker, reference = self._start()
        self._tasks[reference] = worker, None
        self._begun = time.monotonic()

    def answers(self, orders: Iterable[Order]) -> Iterator[Answer]:
        """Let workers execute orders to clients, and yield the clients' answers.

        At most two orders per worker are pending, so that downloads do not fill the memory.

        Yields:
            The answers, in the same sequence as their orders in `orders`.
        """
        source, answers = iter(enumerate(orders)), dict[int, Answer]()
        pending = dict(islice(source, 2 * self.size))
        todo = deque(pending)
        while pending:
            while todo and self._idle:
                worker, number = self._idle.pop(), todo.popleft()
                self._tasks[worker.work.remote(pending[number])] = worker, number
            if (first := next(iter(pending))) in answers:
                del pending[first]
                yield answers.pop(first)
                for number, order in islice(source, 1):
                    pending[number] = order
                    todo.append(number)
            else:
                number, answer = self._next(pending)
                if answer is not None:
                    answers[number] = answer
                elif number is not None:
                    todo.appendleft(number)

    def _next(self, orders: Mapping[int, Order]) -> tuple[Any, Answer | None]:
        """Wait until a worker has started or answered, and replace a worker that is lost.

        Returns:
            The number of an order and its answer. The answer is None if the order's worker was
            lost. Both are None if a worker started or failed to start, or if nothing happened
            within `CHECK` seconds.
        """
        ready, _ = ray.wait(list(self._tasks), timeout=CHECK)
        if not ready:
            self._check()
            return None, None
        worker, number = self._tasks.pop(ready[0])
        task = "The start of a worker" if number is None else f"Client {orders[number].client!r}"
        try:
            answer = ray.get(ready[0])
        except (RayActorError, ObjectLostError) as error:
            log.warning("%s: the worker is lost: %s", task, error)
            self._losses[number] += 1
            if self._losses[number] == TRIES:
                raise CoterieError(
                    f"{task} failed: {TRIES} workers were lost, one after another; see {LOG} in "
                    "the run folder."
                ) from error
            self._begin()
            return number, None
        except RayTaskError as error:
            if isinstance(error.cause, CoterieError):
                raise CoterieError(str(error.cause)) from error
            log.exception("%s failed", task)
            raise CoterieError(f"{task} failed; see {LOG} in the run folder.") from error
        self._losses.pop(number, None)
        self._idle.append(worker)
        return number, answer

    def _check(self) -> None:
        """Raise CoterieError if the cluster is gone, or no worker starts within `START` seconds.

        The time limit does not apply while any worker is executing an order.
        """
        check_address(ray.get_runtime_context().gcs_address)
        if any(number is not None for _, number in self._tasks.values()):
            return
        waited = time.monotonic() - self._begun
        if waited > START or not any(node["Alive"] for node in ray.nodes()):
            raise CoterieError(
                f"No worker could start within {waited:.0f} seconds: other work occupies the "
                "cluster, or its machines are gone. To continue the run later, use --resume."
            )


class Worker:
    """A worker's process. Between orders, it keeps the run's bases and participants."""

    def begin(
        self,
        values: Mapping[str, Any],
        plugins: Mapping[str, Mapping[str, str]],
        threads: int,
        device: Device,
        texts: "list[ray.ObjectRef[Any]]",
    ) -> None:
        """Load the plugins and all clients' data. Each base is loaded when it is first needed.

        Args:
            values: The data of the run file.
            plugins: The file and the hash of each plugin, as in `RunConfig.plugins`.
            threads: The number of threads.
            device: The device on which bases are loaded.
            texts: A list whose only item is a Ray reference to a mapping from each client's name
                to the client's data, a `Participant`. Without the list, Ray would unpickle the data
                before it calls this method, and the plugins would not be loaded yet.
        """
        for plugin in plugins.values():
            load_plugin(plugin["file"], expected=plugin["sha256"])
        torch.set_num_threads(threads)
        self.config = config = parse(values)
        precision, window = config.precision, config.data.window
        self.bases = Bases(precision, window, config.root, device)
        self.participants = ray.get(texts[0])

    def work(self, order: Order) -> Answer:
        """Execute an order."""
        host, message, metrics = self._client(order)
        if order.do == "hello":
            parameters = host.side.parameters()
            check_messages(message_sizes(self.config, parameters, len(self.participants)))
            return Answer(message, covered=host.covered)
        if order.do == "step":
            try:
                message = host.step(order.turn, order.download, counted=order.counted)
            except Diverged as error:
                host, _, metrics = self._client(order)
                metrics.log(order.client, BYTES_DOWN, len(order.download))
                message = error
        elif order.do == "finish":
            kept = decoded(order.kept)
            host.finish(order.download, kept, order.turn, counted=order.counted)
        scores: list[tuple[Any, ...]] = []
        host.keep_items(lambda *arguments: scores.append(arguments))
        return Answer(message, metrics.take(), list(encoded(host.states())), scores)

    def _client(self, order: Order) -> tuple[ClientHost, bytes, Recorder]:
        """Create the client that an order is for, and restore its state.

        Returns:
            The client, the client's serialised first message, and the recorder of metrics.
        """
        metrics = Recorder(lambda *_: None)
        metrics.turn = order.turn
        base = self.bases[self.config.base_of(order.client)]
        host = ClientHost(self.config, base, self.participants[order.client], metrics)
        self.participants[order.client] = host.participant  # its reference data are slow to compute
        hello = host.hello()
        if (state := decoded(order.state)) is not None:
            host.restore(state, decoded(order.kept))
        return host, hello, metrics

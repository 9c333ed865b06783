"""Measure how fast a mailbox's server responds while the main thread of its process is busy.

The server of a deployment transfers messages in a thread, and shares Python's global interpreter
lock (GIL) with the main thread. In each row, a new process runs a mailbox's server and repeats one
kind of work in its main thread. Three clients in another process send requests over TLS:

- *heartbeat*: the time of a request `POST /session`;
- *delivery*: the time from `Mailbox.send` until a client that waits for an order has downloaded it;
- *upload*: the rate of a 50 MB reply, including the check of its digest.

The kinds of work are `idle`; `mean` (the aggregation of 8 uploads of 100 MB); `fedmkt` (short runs
of FedMKT with very small models, whose server trains and evaluates); `train` (steps of a model of
GPT-2's shape); `assign` (FedAMoLE's assignment of 1,000 experts to 1,000 clients); `map` (a map
between two vocabularies of 32,000 random tokens); `header` (parsing a reply with the largest
permitted header, 16 MiB of JSON); `copy` (adding and removing the header of a message of 758 MB,
which copies it while the GIL is held); and `exchange` (all work of the main thread on an order of
758 MB: encoding, storing, reading and decoding it). The column *s* shows the duration of one
repetition in seconds.
"""

import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import torch
from common import gpt2, options_of, random_ids, show, write
from server_memory import joined, make_exchange, make_upload, take
from transformers import GPT2Config, GPT2LMHeadModel

import coterie
from coterie.alignment import Vocabulary, vocabulary_map
from coterie.bases import EMBEDDED
from coterie.config.run import parse
from coterie.messages import Message
from coterie.messages.envelope import LARGEST_HEADER, Entry, Order, Reply, seal, unseal
from coterie.messages.names import VALIDATION_LOSS
from coterie.methods.adapter import AdapterServer
from coterie.methods.contract import ServerContext
from coterie.methods.fedamole.assignment import Bounds, assign, relevance
from coterie.methods.registry import method_from
from coterie.network.address import listen
from coterie.network.client import Connection
from coterie.network.keys import Credentials, Keys
from coterie.network.mailbox import Mailbox
from coterie.network.order_files import OrderFiles
from coterie.network.server import MailboxServer
from coterie.testing.small import teaching_values, write_base, write_other_base, write_questions
from coterie.training.spec import TrainingSpec

MB = 1_000_000
UPLOAD = 50 * MB
LARGEST_MESSAGE = 758 * MB
CLIENTS = ("heartbeat", "delivery", "upload")
Work = Callable[[], object]


@dataclass(frozen=True)
class Latencies:
    """The distribution of a latency, in seconds."""

    number: int
    median: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, seconds: list[float]) -> "Latencies":
        """Summarise measured latencies."""
        median, p99, maximum = np.quantile(seconds, [0.5, 0.99, 1.0])
        return cls(len(seconds), float(median), float(p99), float(maximum))


@dataclass(frozen=True)
class Row:
    """The measurements during one kind of work."""

    work: str
    seconds: float
    """The median duration of one repetition of the work."""
    heartbeat: Latencies
    delivery: Latencies
    rates: list[float]
    """The rate of each upload, in bytes per second."""
    load: float
    """The machine's load average over a minute, at the end."""


def idle(folder: Path) -> Work:
    """Return a function that does nothing for a second."""
    return lambda: time.sleep(1)


def mean(folder: Path) -> Work:
    """Return a function that aggregates 8 stored uploads of 100 MB."""
    method = method_from({"name": "fedavg", "mlp": {"rank": 104}, "attention": {"rank": 104}})
    clients = tuple(f"client-{number}" for number in range(8))
    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config())
    server = method.server(ServerContext(0, base, clients, lambda *_: None, TrainingSpec()))
    assert isinstance(server, AdapterServer)
    exchange, value = make_exchange(method, clients, folder), joined(server, clients)
    for client in clients:
        body = make_upload(server, value, client, exchange)
        assert 95 * MB < len(body) < 105 * MB, len(body)
        take(server, value, client, body, exchange)
    assert exchange.counted == list(clients)

    def aggregate() -> None:
        exchange.repeat()
        exchange.mean("adapter")

    return aggregate


def fedmkt(folder: Path) -> Work:
    """Return a function that executes a short run of FedMKT."""
    base, questions = write_base(folder / "base"), folder / "questions"
    other = write_other_base(folder / "other", EMBEDDED / "demo-writers" / "poet.txt")
    questions.mkdir()
    config = parse(teaching_values(base, other, write_questions(questions), rounds=6))
    return lambda: coterie.run(config, out=folder / f"run-{time.monotonic_ns()}")


def train(folder: Path) -> Work:
    """Return a function that executes a forward and a backward pass of a model."""
    model, ids = gpt2().requires_grad_(True), random_ids(2, 128, vocabulary=50257)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids).loss
        assert loss is not None
        loss.backward()
        model.zero_grad()

    return step


def solve(folder: Path) -> Work:
    """Return a function that assigns 1,000 experts to 1,000 clients."""
    generator = np.random.default_rng(0)
    scores = relevance(3 * generator.normal(size=(1000, 8)), generator.normal(size=(1000, 8)), 8)
    return lambda: assign(scores, Bounds(clients_per_expert=2, least=1, most=8))


def align(folder: Path) -> Work:
    """Return a function that maps 32,000 random tokens to 32,000 others."""
    draw = random.Random(0)

    def vocabulary() -> Vocabulary:
        letters = b"etaoinshrdlu"
        words = {bytes(draw.choices(letters, k=draw.randint(2, 12))) for _ in range(32_000)}
        return Vocabulary(tuple(sorted(words)), {})

    source, target = vocabulary(), vocabulary()
    return lambda: vocabulary_map(source, target)


def header(folder: Path) -> Work:
    """Return a function that parses a reply whose header is as large as permitted."""
    entry = Entry(round=0, client="anna", name=VALIDATION_LOSS, value=6.5)
    size = len(json.dumps(entry.model_dump())) + 2
    entries = [entry] * (LARGEST_HEADER // size - 100)
    data = seal(Reply(run="0" * 16, client="anna", kind="step", turn=0, entries=entries))
    assert len(data) > 0.95 * LARGEST_HEADER
    return lambda: unseal(Reply, data)


def copy(folder: Path) -> Work:
    """Return a function that adds a header to a large message, and removes it again."""
    order, body = Order(run="0" * 16, client="anna", kind="step", turn=0), bytes(LARGEST_MESSAGE)
    return lambda: unseal(Order, seal(order, body))


def exchange(folder: Path) -> Work:
    """Return a function that encodes and stores an order of 758 MB, reads it and decodes it."""
    order = Order(run="0" * 16, client="anna", kind="step", turn=0)
    tensors = {f"layer-{n}": torch.randn(LARGEST_MESSAGE // 4 // 50) for n in range(50)}
    message = Message(0, {"adapter": tensors})
    files = OrderFiles(folder / "orders")

    def run() -> None:
        stored = files.write(seal(order, message.encode()), 60)
        _, body = unseal(Order, stored.path.read_bytes())
        stored.delete()
        assert Message.decode(body).exchange == 0

    return run


WORKS: dict[str, Callable[[Path], Work]] = {
    "idle": idle,
    "mean": mean,
    "fedmkt": fedmkt,
    "train": train,
    "assign": solve,
    "map": align,
    "header": header,
    "copy": copy,
    "exchange": exchange,
}


def post_orders(mailbox: Mailbox, stop: threading.Event) -> None:
    """Send the next order to each waiting client, whenever its last order has been completed."""
    tickets: dict[str, str] = {}
    while not stop.wait(0.03):
        for ticket, _ in mailbox.replies(list(tickets.values())):
            tickets = {name: other for name, other in tickets.items() if other != ticket}
        for name in mailbox.present().keys() & {"delivery", "upload"} - tickets.keys():
            data = struct.pack("d", time.monotonic())
            tickets[name] = mailbox.send(name, data, 0, 60)


def serve(kind: str, folder: Path, threads: int) -> float:
    """Run a server and one kind of work until a file `stop` exists; return the work's duration."""
    torch.set_num_threads(threads)
    work = WORKS[kind](folder)
    work()
    mailbox, listening, stop = Mailbox(folder / "mailbox"), listen("127.0.0.1:0"), threading.Event()
    seconds: list[float] = []
    with MailboxServer(mailbox, Keys(folder / "keys"), listening, UPLOAD):
        poster = threading.Thread(target=post_orders, args=(mailbox, stop))
        poster.start()
        port = listening.getsockname()[1]
        (folder / "port.new").write_text(str(port))
        (folder / "port.new").rename(folder / "port")
        while not (folder / "stop").exists():
            began = time.monotonic()
            work()
            seconds.append(time.monotonic() - began)
        stop.set()
        poster.join()
    return float(np.median(seconds))


def heartbeats(connection: Connection, end: float) -> list[float]:
    """Return the durations of requests `POST /session`."""
    latencies = []
    while (began := time.monotonic()) < end:
        connection._request("POST", "/session")
        latencies.append(time.monotonic() - began)
        time.sleep(0.02)
    return latencies


def deliveries(connection: Connection, end: float) -> list[float]:
    """Return the times from the sending of each order to its delivery."""
    latencies = []
    while time.monotonic() < end:
        if (data := connection.next_order()) is not None:
            latencies.append(time.monotonic() - struct.unpack("d", data)[0])
            connection.decline()
    return latencies


class Uploader:
    """A worker that replies with 50 MB, and notes the time at which it has replied."""

    def __init__(self) -> None:
        self.finished = False
        self.reply = os.urandom(UPLOAD)
        self.replied = 0.0

    def answer(self, data: bytes) -> bytes:
        """Return the reply."""
        self.replied = time.monotonic()
        return self.reply


def uploads(connection: Connection, number: int) -> list[float]:
    """Return the rate of each upload, in bytes per second."""
    worker, rates = Uploader(), []
    while len(rates) < number:
        worker.replied = 0.0
        connection.serve(worker)
        if worker.replied:
            rates.append(UPLOAD / (time.monotonic() - worker.replied))
    return rates


def measure(kind: str, seconds: float, number: int, threads: int) -> Row:
    """Measure during one kind of work."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        keys = Keys.create(folder / "keys")
        for name in CLIENTS:
            keys.add(name, folder / f"{name}.key")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            process = pool.submit(serve, kind, folder, threads)
            try:
                row = observe(folder, process, seconds, number)
            finally:
                (folder / "stop").touch()
            duration = process.result()
    return Row(kind, duration, *row, os.getloadavg()[0])


def observe(
    folder: Path, process: "Future[float]", seconds: float, number: int
) -> tuple[Latencies, Latencies, list[float]]:
    """Send requests to the server of another process, and return their times."""
    while not (folder / "port").exists():
        if process.done():
            process.result()  # raises the error of the server's process
        time.sleep(0.1)
    address = f"localhost:{(folder / 'port').read_text()}"
    connections = {
        name: Connection(address, Credentials.load(folder / f"{name}.key")) for name in CLIENTS
    }
    end = time.monotonic() + seconds
    latencies: dict[str, list[float]] = {}
    tasks = {"heartbeat": heartbeats, "delivery": deliveries}

    def run(name: str) -> None:
        latencies[name] = tasks[name](connections[name], end)

    threads = [threading.Thread(target=run, args=(name,)) for name in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rates = uploads(connections["upload"], number)
    for connection in connections.values():
        with suppress(httpx.HTTPError):
            connection.disconnect()
    return Latencies.of(latencies["heartbeat"]), Latencies.of(latencies["delivery"]), rates


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    times = [
        f"{1000 * value:,.0f}"
        for latency in (row.heartbeat, row.delivery)
        for value in (latency.median, latency.p99, latency.maximum)
    ]
    rate = f"{np.median(row.rates) / MB:,.0f}"
    return [row.work, f"{row.seconds:.2f}", *times, rate, f"{row.load:.1f}"]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--works", default=",".join(WORKS), help="kinds of work")
    parser.add_argument("--seconds", type=float, default=15, help="duration of a measurement")
    parser.add_argument("--uploads", type=int, default=3, help="number of uploads")
    options = parser.parse_args()
    rows = []
    for kind in options.works.split(","):
        rows.append(measure(kind, options.seconds, options.uploads, options.threads))
        write(options, rows=rows)
    columns = ("work", "s", "heartbeat ms", "p99", "max", "delivery ms", "p99", "max")
    show(
        "Latencies (median, 99th percentile, maximum) by the work of the main thread",
        (*columns, "upload MB/s", "load"),
        [cells(row) for row in rows],
    )


if __name__ == "__main__":
    main()

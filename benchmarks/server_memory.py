"""How much memory a server needs for a round, with 4 and with 100 clients.

Uploads of random values in the shapes of low-rank pairs on GPT-2 (124M) arrive one by one as bytes,
are checked and counted in, and the round is closed; ranks are 4, 8 and 16 in turn where clients may
differ. Every row has a fresh process. `before` is its resident memory when the server stands and
nobody has sent anything; `round` is how far it rose above that until the first download was made
(Linux's VmHWM, reset at the start of the round).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import torch
from common import MIB, fresh, options_of, resident, show, write
from transformers import GPT2Config, GPT2LMHeadModel

from coterie.exchanges.ends import ServerTransforms
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Message
from coterie.methods.adapter import AdapterMethod, AdapterServer, Shared
from coterie.methods.contract import Method, ServerContext
from coterie.methods.registry import method_from
from coterie.seeding import generator
from coterie.training.spec import TrainingSpec
from coterie.turn import FIRST

METHODS = ("fedavg", "hetlora", "flexlora")


@dataclass(frozen=True)
class Peak:
    """What a round needed, in bytes."""

    method: str
    clients: int
    upload: int
    """The largest upload."""
    before: int
    round: int


def measure(name: str, count: int, threads: int) -> Peak:
    """One round; to be called once per process."""
    torch.set_num_threads(threads)
    clients = tuple(f"client-{number:03d}" for number in range(count))
    ranks = {client: (16, 8, 4)[number % 3] for number, client in enumerate(clients)}
    method = method_from(name)
    if isinstance(method, AdapterMethod) and method.mixes_ranks:
        method = method_from({"name": name, "mlp": {"rank": ranks}})
    with torch.device("meta"):
        base = GPT2LMHeadModel(GPT2Config())
    server = method.server(ServerContext(0, base, clients, lambda *_: None, TrainingSpec()))
    assert isinstance(server, AdapterServer)
    value = joined(server, clients)
    Path("/proc/self/clear_refs").write_text("5")
    before, largest = resident("VmRSS"), 0
    exchange = make_exchange(method, clients, Path(gettempdir()))
    for client in clients:
        upload = make_upload(server, value, client, exchange)
        largest = max(largest, len(upload))
        take(server, value, client, upload, exchange)
    value = server.aggregate(value, exchange)
    method.schema().send("down", server.download(value, clients[0], exchange))
    return Peak(name, count, largest, before, resident("VmHWM") - before)


def joined(server: AdapterServer, clients: Sequence[str]) -> Shared:
    """The server's value when all clients have joined."""
    value = server.initial()
    for client in clients:
        shapes = {name: list(server.shape(client, name)) for name in server.start}
        hello = Message(values={"shapes": shapes, "tokens": 100_000})
        value = server.join(value, client, hello)
    return value


def make_exchange(method: Method, clients: Sequence[str], folder: Path) -> Exchange:
    """The first exchange, without transforms."""
    schema = method.schema()
    exchange = Exchange(folder, ServerTransforms(Pipeline((), schema, 1)), schema)
    exchange.open(FIRST, clients)
    return exchange


def make_upload(server: AdapterServer, value: Shared, client: str, exchange: Exchange) -> bytes:
    """Random values, encoded."""
    chance = generator(0, "upload", client)
    expected = server.expects(value, client, exchange).items()
    groups = {
        group: {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
        for group, shapes in expected
    }
    return Message(0, groups).encode()


def take(
    server: AdapterServer, value: Shared, client: str, body: bytes, exchange: Exchange
) -> None:
    """Decode, check and store an upload."""
    upload = exchange.schema.receive("up", body)
    server.check(value, client, upload, exchange)
    exchange.put(client, upload, partial(server.reference, value, client))


def cells(row: Peak) -> list[str]:
    sizes = (f"{size / MIB:,.1f}" for size in (row.upload, row.before, row.round))
    return [row.method, str(row.clients), *sizes]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--clients", default="4,100", help="numbers of clients")
    parser.add_argument("--methods", default=",".join(METHODS))
    options = parser.parse_args()
    peaks = [
        fresh(measure, name, int(count), options.threads)
        for name in options.methods.split(",")
        for count in options.clients.split(",")
    ]
    show(
        "Memory of a server in one round, low-rank pairs on GPT-2 124M",
        ("method", "clients", "upload MiB", "before MiB", "round MiB"),
        [cells(row) for row in peaks],
    )
    write(options, rows=peaks)


if __name__ == "__main__":
    main()

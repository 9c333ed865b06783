"""How much memory a server needs for a round, with 4 and with 100 clients.

Uploads of random values in the shapes of low-rank pairs on GPT-2 (124M) arrive one by one as bytes,
are checked and counted in, and the round is closed; ranks are 4, 8 and 16 in turn where clients may
differ. Every row has a fresh process. `before` is its resident memory when the server stands and
nobody has sent anything; `round` is how far it rose above that until the first download was made
(Linux's VmHWM, reset at the start of the round).
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import torch
from common import MIB, fresh, options_of, resident, show, write
from transformers import GPT2Config, GPT2LMHeadModel

from coterie.exchanges.exchange import Exchange
from coterie.exchanges.mean import Aggregation
from coterie.messages import Message
from coterie.methods.adapter import AdapterMethod, AdapterServer
from coterie.methods.contract import ServerContext
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
    for client in clients:
        shapes = {name: list(server.shape(client, name)) for name in server.shared}
        server.join(client, Message(values={"shapes": shapes, "tokens": 100_000}))
    server.start_round(0, list(clients))
    Path("/proc/self/clear_refs").write_text("5")
    before, largest = resident("VmRSS"), 0
    exchange = Exchange(Path(gettempdir()), server, Aggregation(method.schema()))
    for client in clients:
        upload = make_upload(server, client)
        largest = max(largest, len(upload))
        exchange.take(client, upload)
    mean = exchange.mean(FIRST)
    server.end_round(mean, mean.values["held"])
    method.schema().send("down", server.download(clients[0]))
    return Peak(name, count, largest, before, resident("VmHWM") - before)


def make_upload(server: AdapterServer, client: str) -> bytes:
    """Random values, encoded."""
    chance = generator(0, "upload", client)
    groups: dict[str, dict[str, torch.Tensor]] = {"adapter": {}, "experts": {}}
    averaged = server.expects(client)["adapter"]
    for name, shape in server.held[client].items():
        group = "adapter" if name in averaged else "experts"
        groups[group][name] = torch.randn(shape, generator=chance)
    return Message(0, groups).encode()


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

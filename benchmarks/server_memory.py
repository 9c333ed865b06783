"""Memory of a server in its rounds, with 4 and with 100 clients.

Uploads of random values in the shapes of low-rank pairs on GPT-2 (124M), or on a base of Llama's
shape (--base), arrive one by one as bytes, are checked and counted in, and the round is closed;
ranks are 4, 8 and 16 in turn where clients may differ. There are two rounds, so that every client
has its own mean with `auto`, and a checkpoint is written. Every row has a fresh process. `before`
is its resident memory when the server stands and nobody has sent anything; `rounds` is how far it
rose above that (Linux's VmHWM, reset at the start of the first round).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import MIB, fresh, gpt2, llama, options_of, resident, show, write
from transformers import LlamaForCausalLM

from coterie.exchanges.exchange import Exchange
from coterie.exchanges.lazy import PART
from coterie.exchanges.pipeline import Pipeline
from coterie.exchanges.spec import AggregationSpec
from coterie.memory import return_freed_memory
from coterie.messages import Message
from coterie.methods.adapter import AdapterMethod, AdapterServer
from coterie.methods.contract import Method, Server, ServerContext
from coterie.methods.registry import method_from
from coterie.runs import RunFolder
from coterie.seeding import generator
from coterie.training.spec import TrainingSpec
from coterie.turn import FIRST, Turn

METHODS = ("fedavg", "hetlora", "flexlora", "auto", "grouped", "fedalt", "fedlease")
ROUNDS = 8
"""The number of rounds of the run; trials of `auto` depend on it."""


@dataclass(frozen=True)
class Peak:
    """The memory of two rounds, in bytes."""

    method: str
    clients: int
    upload: int
    """The largest upload."""
    before: int
    rounds: int


def measure(name: str, base_name: str, count: int, threads: int) -> Peak:
    """Measure two rounds; every call needs a new process."""
    torch.set_num_threads(threads)
    return_freed_memory()  # as `coterie server` does
    clients = tuple(f"client-{number:03d}" for number in range(count))
    ranks = {client: (16, 8, 4)[number % 3] for number, client in enumerate(clients)}
    groups = {client: f"group-{number % 4}" for number, client in enumerate(clients)}
    settings = {"grouped": {"groups": groups}, "fedlease": {"warmup": 1}}
    method = method_from({"name": name, **settings.get(name, {})})
    if isinstance(method, AdapterMethod) and method.mixes_ranks:
        method = method_from({"name": name, "mlp": {"rank": ranks}})
    with torch.device("meta"):
        base = gpt2() if base_name == "gpt2" else LlamaForCausalLM(llama(base_name))
    context = ServerContext(0, base, clients, lambda *_: None, TrainingSpec(), ROUNDS)
    server = method.server(context)
    value: Any = joined(server, clients)
    Path("/proc/self/clear_refs").write_text("5")
    before, largest = resident("VmRSS"), 0
    with TemporaryDirectory() as folder:
        exchange = make_exchange(method, clients, Path(folder))
        for number in range(2):
            exchange.open(Turn(number, number, number), clients)
            exchange.begin()
            for client in clients:
                upload = make_upload(server, value, client, exchange)
                largest = max(largest, len(upload))
                take(server, value, client, upload, exchange)
            value = server.aggregate(value, exchange).stored(exchange.store)
            exchange.open(Turn(number + 1, number + 1, number + 1), ())
            for client in clients:
                method.schema().send("down", server.download(value, client, exchange))
        state = value.state()
        files = ((f"{PART}{name}", part) for name, part in state.parts.unread.items())
        states = [("server", replace(state, parts={})), *files]
        RunFolder(Path(folder)).save(2, states)
    return Peak(name, count, largest, before, resident("VmHWM") - before)


def joined(server: Server[Any], clients: Sequence[str]) -> Any:
    """Return the server's value after all clients have joined."""
    value = server.initial()
    for client in clients:
        shapes = {}
        if isinstance(server, AdapterServer):
            shapes = {name: list(server.shape(client, name)) for name in server.start}
        hello = Message(values={"shapes": shapes, "tokens": 100_000})
        value = server.join(value, client, hello)
    return value


def make_exchange(method: Method, clients: Sequence[str], folder: Path) -> Exchange:
    """Return the first exchange, without transforms."""
    schema = method.schema()
    exchange = Exchange(folder, Pipeline((), schema, 1), schema, AggregationSpec())
    exchange.open(FIRST, clients)
    return exchange


def make_upload(server: Server[Any], value: Any, client: str, exchange: Exchange) -> bytes:
    """Return an encoded upload of random values."""
    chance = generator(0, "upload", client)
    expected = server.expects(value, client, exchange).items()
    groups = {
        group: {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}
        for group, shapes in expected
    }
    values = {}
    if any(field.name == "choice" for field in exchange.schema.up):
        row = torch.rand(len(exchange.clients), generator=chance).tolist()
        values = {
            "choice": {"row": dict(zip(exchange.clients, row, strict=True)), "tokens": 100_000}
        }
    return Message(0, groups, values).encode()


def take(server: Server[Any], value: Any, client: str, body: bytes, exchange: Exchange) -> None:
    """Decode, check and store an upload."""
    upload = exchange.schema.receive("up", body)
    server.check(value, client, upload, exchange)
    exchange.put(client, upload, partial(server.reference, value, client))


def cells(row: Peak) -> list[str]:
    sizes = (f"{size / MIB:,.1f}" for size in (row.upload, row.before, row.rounds))
    return [row.method, str(row.clients), *sizes]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--clients", default="4,100", help="numbers of clients")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--base", default="gpt2", choices=("gpt2", "1b", "8b"))
    options = parser.parse_args()
    peaks = [
        fresh(measure, name, options.base, int(count), options.threads)
        for name in options.methods.split(",")
        for count in options.clients.split(",")
    ]
    show(
        f"Memory of a server in two rounds, low-rank pairs on {options.base}",
        ("method", "clients", "upload MiB", "before MiB", "rounds MiB"),
        [cells(row) for row in peaks],
    )
    write(options, rows=peaks)


if __name__ == "__main__":
    main()

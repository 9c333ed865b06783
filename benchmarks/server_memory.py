"""How much memory a server needs for a round, with 4 and with 100 clients.

Uploads of random values in the shapes of low-rank pairs on GPT-2 (124M) arrive one by one as bytes,
are checked and counted in, and the round is closed; ranks are 4, 8 and 16 in turn where clients may
differ. Every row has a fresh process. `before` is its resident memory when the server stands and
nobody has sent anything; `round` is how far it rose above that until the first download was made
(Linux's VmHWM, reset at the start of the round).
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPT2Config, GPT2LMHeadModel

from coterie.aggregation.mean import Aggregation, Contribution
from coterie.aggregation.spec import AggregationSpec
from coterie.engines.runtime import contribution
from coterie.messages import Message
from coterie.methods.adapter import AdapterMethod, AdapterServer
from coterie.methods.contract import ServerContext
from coterie.methods.registry import method_from
from coterie.seeding import generator
from coterie.training.spec import TrainingSpec

MIB = 2**20
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
    server.open(0, list(clients))
    Path("/proc/self/clear_refs").write_text("5")
    before, largest = resident("VmRSS"), 0
    aggregation = Aggregation(AggregationSpec(), method.schema())

    def contributions() -> Iterator[Contribution]:
        nonlocal largest
        for client in clients:
            upload = make_upload(server, client)
            largest = max(largest, len(upload))
            yield contribution(server, aggregation, client, method.schema().receive("up", upload))

    server.close(aggregation.mean(0, contributions()))
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


def resident(which: str) -> int:
    """This process's resident memory in bytes: VmRSS, now, or VmHWM, at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def show(peaks: list[Peak]) -> None:
    table = Table(title="Memory of a server in one round, low-rank pairs on GPT-2 124M")
    for column in ("method", "clients", "upload MiB", "before MiB", "round MiB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in peaks:
        sizes = (f"{size / MIB:,.1f}" for size in (row.upload, row.before, row.round))
        table.add_row(row.method, str(row.clients), *sizes)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="4,100", help="numbers of clients")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    peaks = []
    fresh = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
    with fresh:
        for name in options.methods.split(","):
            for count in map(int, options.clients.split(",")):
                peaks.append(fresh.submit(measure, name, count, options.threads).result())
    show(peaks)
    if options.json:
        record = {"threads": options.threads, "rows": [asdict(row) for row in peaks]}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What a deployment costs beyond training: seconds per round and where they go, and memory.

The server runs in this process, clients are real ones (`coterie client`), with TLS and the mailbox
between them, all on this machine. The embedded base has low-rank pairs of rank 24, so that
an upload weighs 2.4 MB, as with GPT-2 at rank 8 in bf16, and trains for one step of one short
sample, so that little but overhead is left. The first round is left out.

*step* is the slowest client's own work, checkpoint and upload from store included (its metric
`seconds`); *orders* is the time in which the server encodes downloads and writes them to disk;
*replies* that in which it reads uploads and checks them; *count* aggregation; *save* its
checkpoint; *rest* what is left: waiting, and whatever else the machine does.
"""

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from common import MIB, options_of, recorded, resident, show, write

from coterie.aggregation.mean import Aggregation
from coterie.bases import EMBEDDED
from coterie.config.run import RunConfig, parse
from coterie.deployment.mailbox import MailboxServing
from coterie.deployment.server import ServerRun
from coterie.deployment.start import serve
from coterie.deployment.status import ServerWatch, Status
from coterie.messages.names import BYTES_UP, SECONDS
from coterie.network.keys import Keys
from coterie.network.mailbox import Mailbox
from coterie.runs import RunFolder

PHASES = ("orders", "replies", "count", "save")
TEXT = EMBEDDED / "demo-writers" / "poet.txt"


@dataclass(frozen=True)
class Cost:
    """One deployment: seconds are medians over rounds, memory is in bytes."""

    clients: int
    upload: int
    round: float
    step: float
    phases: dict[str, float]
    idle: int
    """Resident memory of the server's process before anybody has joined ..."""
    server: int
    """... and at most, later."""
    worker: int
    """The largest client's process, at most."""

    @property
    def overhead(self) -> float:
        """Seconds per round beyond the slowest client's own work."""
        return self.round - self.step


class Phases:
    """Seconds by phase and round, taken by wrapping what the server does."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = [defaultdict(float)]

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time counted."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                found = function(*args, **kwargs)
                return list(found) if phase == "replies" else found
            finally:
                self.rounds[-1][phase] += time.perf_counter() - began

        return wrapped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, servers' phases are timed."""
        wrap: list[tuple[Any, str, str]] = [
            (ServerRun, "_send", "orders"),
            (Mailbox, "replies", "replies"),
            (Aggregation, "mean", "count"),
            (RunFolder, "save", "save"),
        ]
        with ExitStack() as stack:
            for owner, name, phase in wrap:
                timed = self.timed(phase, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            yield


class Rounds(ServerWatch):
    """Records where rounds end, and the memory of the server and of the clients."""

    def __init__(self, phases: Phases, clients: list["subprocess.Popen[bytes]"]) -> None:
        self.phases, self.clients = phases, clients
        self.idle = 0
        self.peaks = dict.fromkeys(range(len(clients)), 0)

    def show(self, status: Status) -> None:
        if not self.idle:
            Path("/proc/self/clear_refs").write_text("5")
            self.idle = resident("VmRSS")
        while len(self.phases.rounds) <= status.done:
            self.phases.rounds.append(defaultdict(float))
        for number, client in enumerate(self.clients):
            if client.poll() is None:
                self.peaks[number] = max(self.peaks[number], resident("VmHWM", client.pid))


def run_file(names: list[str], rounds: int) -> RunConfig:
    """Clients of little work and large uploads."""
    return parse(
        {
            "name": "cost",
            "threads": 1,
            "method": {"name": "comigs-1g1s", "mlp": {"rank": 24}, "attention": {"rank": 24}},
            "rounds": rounds,
            "data": {"window": 32, "limits": {"train": 2000, "validation": 400, "test": 400}},
            "clients": [{"name": name, "path": str(TEXT)} for name in names],
            "training": {"steps": 1, "batch": 1},
            "evaluation": {"keep": "last"},
        }
    )


def deploy(count: int, rounds: int, port: int) -> Cost:
    """One deployment with so many clients."""
    names = [f"client-{number}" for number in range(count)]
    phases = Phases()
    with TemporaryDirectory() as place:
        folder = Path(place)
        keys = Keys.create(folder / "keys")
        clients = []
        for name in names:
            key = keys.add(name, folder / f"{name}.key")
            command = [
                *(sys.executable, "-m", "coterie", "client", "--server", f"localhost:{port}"),
                *("--key", str(key), "--data", str(TEXT), "--yes", "--out", str(folder / name)),
            ]
            clients.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        config = run_file(names, rounds)
        watch = Rounds(phases, clients)
        try:
            with phases.watching():
                serving = MailboxServing(watch, keys=keys, address=f"127.0.0.1:{port}")
                server = serve(config, folder / "run", serving)
        finally:
            for client in clients:
                client.terminate()
                client.wait()
        steps = [recorded(RunFolder(next((folder / n).glob("cost-*"))), SECONDS) for n in names]
        sizes = recorded(server, BYTES_UP)
        whole = recorded(server, SECONDS)
    inner = slice(1, rounds)
    slowest = [max(s[r] for s in steps) for r in range(*inner.indices(rounds))]
    return Cost(
        clients=count,
        upload=int(max(sizes)),
        round=median(whole[inner]),
        step=median(slowest),
        phases={p: median(r[p] for r in phases.rounds[inner]) for p in PHASES},
        idle=watch.idle,
        server=resident("VmHWM"),
        worker=max(watch.peaks.values()),
    )


def alone(rounds: int) -> int:
    """Peak memory of the local engine with one such client."""
    code = (
        "import sys, json, coterie\n"
        "coterie.run(json.loads(sys.argv[1]), out=sys.argv[2])\n"
        "print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))\n"
    )
    with TemporaryDirectory() as place:
        run = json.dumps(run_file(["client-0"], rounds).as_dict())
        command = [sys.executable, "-c", code, run, f"{place}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) * 1024


def show_costs(costs: list[Cost], local: int) -> None:
    times, memory = [], []
    for cost in costs:
        spent = [cost.phases[phase] for phase in PHASES]
        row = [cost.round, cost.step, cost.overhead, *spent, cost.overhead - sum(spent)]
        figures = (f"{value:.2f}" for value in row)
        times.append((str(cost.clients), f"{cost.upload / 1e6:.2f}", *figures))
        sizes = (cost.idle, cost.server - cost.idle, cost.worker)
        figures = (f"{size / MIB:,.0f}" for size in sizes)
        memory.append((str(cost.clients), *figures, f"{cost.worker / local:.2f}"))
    columns = ("clients", "MB up", "round", "step", "beyond", *PHASES, "rest")
    show("Seconds per round beyond training", columns, times)
    columns = ("clients", "server idle", "server adds", "worker", "x local")
    caption = f"The local engine with one client: {local / MIB:,.0f} MiB."
    show("Memory, MiB", columns, memory, caption)


def main() -> None:
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--clients", default="2,8", help="numbers of clients")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--port", type=int, default=19092)
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = alone(options.rounds)
    costs = [deploy(int(c), options.rounds, options.port) for c in options.clients.split(",")]
    show_costs(costs, local)
    write(options, local=local, rows=costs)


if __name__ == "__main__":
    main()

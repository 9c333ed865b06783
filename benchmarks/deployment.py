"""Measure what a deployment costs beyond training: seconds per round by phase, and memory.

The server runs in this process. The clients are real ones (`coterie client`), each in a process of
its own, and communicate with the server over TLS. All processes are on this machine. The embedded
base has low-rank pairs of rank 24, so that an upload has 2.4 MB, as with GPT-2 at rank 8 in bf16.
Each client trains for one step on one short sample, so that nearly all of the time is overhead. The
first round is excluded.

With `--light N`, N clients share one process and do not train: they send copies of one client's
upload (`light_clients.py`). A real client needs about 630 MB, so 100 of them need a larger machine.
Such a row measures only the server; its seconds include the work of the clients' process.

*step* is the slowest client's own work, including its checkpoint (its metric `seconds`; 0 for light
clients). *orders* is the time in which the server encodes downloads and writes them to disk,
*replies* the time in which it reads uploads and checks them, *count* the aggregation, *save* the
server's checkpoint, and *rest* the remaining time, mostly transfers and waiting.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil
import torch
from common import MIB, options_of, recorded, resident, show, write

from coterie.bases import EMBEDDED
from coterie.config.run import RunConfig, parse
from coterie.deployment.mailbox import MailboxServing
from coterie.deployment.server import ServerRun
from coterie.deployment.start import serve
from coterie.deployment.status import Monitor, ServerWatch, Status
from coterie.exchanges.exchange import Exchange
from coterie.messages.names import BYTES_UP, SECONDS
from coterie.network.keys import Keys
from coterie.network.mailbox import Mailbox
from coterie.runs import RunFolder

PHASES = ("orders", "replies", "count", "save")
TEXT = EMBEDDED / "demo-writers" / "poet.txt"
LIGHT = str(Path(__file__).parent / "light_clients.py")


@dataclass(frozen=True)
class Cost:
    """The cost of one deployment. Seconds are medians over rounds, and sizes are in bytes."""

    clients: int
    light: bool
    """Whether the clients share one process and do not train."""
    upload: int
    """The size of the largest upload."""
    round: float
    """The duration of a round, including the server's checkpoint."""
    step: float
    """The duration of the slowest client's own work."""
    phases: dict[str, float]
    """The server's time in each of `PHASES`."""
    idle: int
    """The resident memory of the server's process before the first client connects."""
    server: int
    """The maximum resident memory of the server's process from then on."""
    worker: int
    """The maximum resident memory of the largest client process."""
    processes: int
    """The maximum number of the server's processes."""
    load: float
    """The machine's load average over a minute, at the end."""

    @property
    def overhead(self) -> float:
        """The duration of a round without the slowest client's own work."""
        return self.round - self.step


class Phases:
    """The seconds that the server spends in each phase of each round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = [defaultdict(float)]

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one and adds its duration to a phase."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                result = function(*args, **kwargs)
                return list(result) if phase == "replies" else result
            finally:
                self.rounds[-1][phase] += time.perf_counter() - began

        return wrapped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the phases of all servers within the `with` block."""
        wrap: list[tuple[Any, str, str]] = [
            (ServerRun, "_send", "orders"),
            (Mailbox, "replies", "replies"),
            (Exchange, "mean", "count"),
            (RunFolder, "save", "save"),
        ]
        with ExitStack() as stack:
            for owner, name, phase in wrap:
                timed = self.timed(phase, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            stack.enter_context(patch.object(Monitor, "closes", self._closing(Monitor.closes)))
            yield

    def _closing(self, closes: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any) -> None:
            closes(*args)
            self.rounds.append(defaultdict(float))

        return wrapped


class Rounds(ServerWatch):
    """Observes the processes of the server and the clients after each round."""

    def __init__(self, clients: Sequence["subprocess.Popen[bytes]"]) -> None:
        self.clients = clients
        self.idle, self.processes, self.worker, self.observed = 0, 1, 0, 0

    def show(self, status: Status) -> None:
        if any(client.poll() for client in self.clients):
            raise RuntimeError("a client's process has failed; see its output")
        if not self.idle:
            Path("/proc/self/clear_refs").write_text("5")
            self.idle = resident("VmRSS")
        if status.done > self.observed:
            self.observed = status.done
            self._observe()

    def _observe(self) -> None:
        clients = {client.pid for client in self.clients}
        children = psutil.Process().children(recursive=True)
        own = [c for c in children if not clients & {c.pid, *(p.pid for p in c.parents())}]
        self.processes = max(self.processes, 1 + len(own))
        for client in self.clients:
            if client.poll() is None:
                self.worker = max(self.worker, resident("VmHWM", client.pid))


def run_file(names: list[str], rounds: int, steps: int = 1) -> RunConfig:
    """Return a run whose clients train little and have large uploads."""
    return parse(
        {
            "name": "cost",
            "threads": 1,
            "method": {"name": "comigs-1g1s", "mlp": {"rank": 24}, "attention": {"rank": 24}},
            "rounds": rounds,
            "data": {"window": 32, "limits": {"train": 2000, "validation": 400, "test": 400}},
            "clients": [{"name": name, "path": str(TEXT)} for name in names],
            "training": {"steps": steps, "batch": 1},
            "evaluation": {"keep": "last"},
        }
    )


def start_clients(
    folder: Path, names: list[str], port: int, light: bool
) -> list["subprocess.Popen[bytes]"]:
    """Start the clients of a deployment, whose key files are in a folder."""
    server, python = f"localhost:{port}", sys.executable
    if light:
        commands = [[python, LIGHT, server, str(folder), str(TEXT), *names]]
    else:
        commands = [
            [
                *(python, "-m", "coterie", "client", "--server", server),
                *("--key", str(folder / f"{name}.key"), "--data", str(TEXT), "--yes"),
                *("--out", str(folder / name)),
            ]
            for name in names
        ]
    return [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]


def deploy(count: int, rounds: int, port: int, light: bool = False) -> Cost:
    """Execute a deployment with `count` clients and measure its cost."""
    names = [f"client-{number}" for number in range(count)]
    phases = Phases()
    with TemporaryDirectory() as place:
        folder = Path(place)
        keys = Keys.create(folder / "keys")
        for name in names:
            keys.add(name, folder / f"{name}.key")
        config = run_file(names, rounds)
        clients = start_clients(folder, names, port, light)
        watch = Rounds(clients)
        try:
            with phases.watching():
                serving = MailboxServing(watch, keys=keys, address=f"127.0.0.1:{port}")
                server = serve(config, folder / "run", serving)
        finally:
            for client in clients:
                client.terminate()
                client.wait()
        trained = [] if light else [RunFolder(next((folder / n).glob(f"{n}-*"))) for n in names]
        steps = [recorded(run, SECONDS) for run in trained] or [[0.0] * rounds]
        sizes = recorded(server, BYTES_UP)
        whole = recorded(server, SECONDS)  # without the server's checkpoint
    whole = [s + r["save"] for s, r in zip(whole, phases.rounds, strict=False)]
    inner = slice(1, rounds)
    slowest = [max(s[r] for s in steps) for r in range(*inner.indices(rounds))]
    return Cost(
        clients=count,
        light=light,
        upload=int(max(sizes)),
        round=median(whole[inner]),
        step=median(slowest),
        phases={p: median(r[p] for r in phases.rounds[inner]) for p in PHASES},
        idle=watch.idle,
        server=resident("VmHWM"),
        worker=watch.worker,
        processes=watch.processes,
        load=os.getloadavg()[0],
    )


def alone(rounds: int) -> int:
    """Return the maximum resident memory of the local engine with one such client."""
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
    """Print the tables of times and memory."""
    times, memory = [], []
    for cost in costs:
        spent = [cost.phases[phase] for phase in PHASES]
        row = [cost.round, cost.step, cost.overhead, *spent, cost.overhead - sum(spent)]
        figures = (f"{value:.2f}" for value in row)
        clients = f"{cost.clients}{' light' if cost.light else ''}"
        times.append((clients, f"{cost.upload / 1e6:.2f}", *figures, f"{cost.load:.1f}"))
        sizes = (cost.idle, cost.server - cost.idle, cost.worker)
        figures = (f"{size / MIB:,.0f}" for size in sizes)
        ratio = "" if cost.light else f"{cost.worker / local:.2f}"
        memory.append((clients, *figures, ratio, str(cost.processes)))
    columns = ("clients", "MB up", "round", "step", "beyond", *PHASES, "rest", "load")
    show("Seconds per round beyond training", columns, times)
    columns = ("clients", "server idle", "server adds", "client", "x local", "server processes")
    caption = f"The local engine with one client: {local / MIB:,.0f} MiB."
    show("Memory, MiB", columns, memory, caption)


def main() -> None:
    """Measure deployments with the given numbers of clients."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--clients", default="2,8", help="numbers of real clients")
    parser.add_argument("--light", default="100", help="numbers of light clients")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--port", type=int, default=19092)
    options = parser.parse_args()
    torch.set_num_threads(1)
    local = alone(options.rounds)
    costs = [
        deploy(int(count), options.rounds, options.port, light=kind == "light")
        for kind in ("clients", "light")
        for count in filter(None, getattr(options, kind).split(","))
    ]
    show_costs(costs, local)
    write(options, local=local, rows=costs)


if __name__ == "__main__":
    main()

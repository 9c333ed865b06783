"""Measure how soon clients are back after their server has been killed and restarted.

The server and the clients (`coterie client`) are real processes, and communicate over TLS on this
machine. After each start, the server is killed as soon as all clients have been connected for a few
seconds. A restarted server loads its libraries for some seconds, in which the clients' pauses
between two attempts reach their maximum. The time runs from the moment at which the server listens
again to the first request of the last client.

With `--steps 1`, the clients mostly wait for orders; with many steps, they train during the
restart, and only their heartbeats reach the server.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from common import options_of, show, write
from deployment import run_file, start_clients

from coterie.deployment import mailbox
from coterie.deployment.mailbox import MailboxServing
from coterie.deployment.start import serve, serve_again
from coterie.deployment.status import ServerWatch
from coterie.network.keys import Keys
from coterie.network.mailbox import Inbox, Mailbox
from coterie.runs import RunFolder

CONNECTED_SECONDS = 6.0
"""The time for which all clients are connected before the server is killed."""
LONGEST_BREAK = 4.0
"""The maximum time between the end of a server and the start of the next one."""


@dataclass(frozen=True)
class Restart:
    """One restart."""

    down: float
    """The time without a listening server, in seconds."""
    back: list[float]
    """The time from the moment the server listens to each client's first request, in seconds."""


def report(**values: Any) -> None:
    """Print a line of JSON with the time on the monotonic clock, which all processes share."""
    print(json.dumps({"time": time.monotonic(), **values}), flush=True)


def run_server(folder: Path, port: int, names: list[str], steps: int) -> None:
    """Run the server in this process; report when it listens, and each client's first request."""
    enter, listen, seen = Mailbox.enter, mailbox.listen, set[str]()

    def entered(mailbox: Mailbox, client: str, *arguments: Any) -> Inbox | None:
        if client not in seen:
            seen.add(client)
            report(client=client)
        return enter(mailbox, client, *arguments)

    def listened(*arguments: Any) -> Any:
        listening = listen(*arguments)
        report(listening=True)
        return listening

    keys, address = Keys(folder / "keys"), f"127.0.0.1:{port}"
    serving = MailboxServing(ServerWatch(), keys=keys, address=address)
    with patch.object(Mailbox, "enter", entered), patch.object(mailbox, "listen", listened):
        if RunFolder(folder / "run").checkpoints():
            serve_again(folder / "run", serving)
        else:
            serve(run_file(names, 100_000, steps), folder / "run", serving)


def lives(folder: Path, port: int, count: int, steps: int) -> "subprocess.Popen[str]":
    """Start a server's process."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    command += ["--port", str(port), "--clients", str(count), "--steps", str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def connected(server: "subprocess.Popen[str]", count: int) -> tuple[float, list[float]]:
    """Wait for the first request of each client.

    Returns:
        The time at which the server listened, and the times of the first requests.
    """
    assert server.stdout is not None
    listening, times = 0.0, list[float]()
    while len(times) < count:
        line = server.stdout.readline()
        if not line:
            raise RuntimeError("the server has ended")
        event = json.loads(line)
        if "client" in event:
            times.append(event["time"])
        else:
            listening = event["time"]
    return listening, times


def measure(count: int, restarts: int, port: int, steps: int) -> list[Restart]:
    """Restart a server with `count` clients repeatedly, and measure each restart."""
    names, draw, measured = [f"client-{n}" for n in range(count)], random.Random(0), []
    with TemporaryDirectory() as place:
        folder = Path(place)
        keys = Keys.create(folder / "keys")
        for name in names:
            keys.add(name, folder / f"{name}.key")
        clients = start_clients(folder, names, port, light=False)
        server = lives(folder, port, count, steps)
        try:
            connected(server, count)
            for _ in range(restarts):
                time.sleep(CONNECTED_SECONDS)
                server.kill()
                server.wait()
                ended = time.monotonic()
                time.sleep(draw.uniform(0, LONGEST_BREAK))
                server = lives(folder, port, count, steps)
                listening, times = connected(server, count)
                measured.append(Restart(listening - ended, [t - listening for t in times]))
                print(measured[-1], flush=True)
        finally:
            for process in (server, *clients):
                process.kill()
                process.wait()
    return measured


def show_restarts(restarts: list[Restart]) -> None:
    """Print the table."""
    last = [max(restart.back) for restart in restarts]
    every = [seconds for restart in restarts for seconds in restart.back]
    rows = [
        (title, str(len(values)), f"{median(values):.2f}", f"{max(values):.2f}")
        for title, values in (("last client", last), ("all clients", every))
    ]
    down = [restart.down for restart in restarts]
    caption = f"No server listened for {min(down):.1f} to {max(down):.1f} seconds."
    columns = ("first request of", "number", "median", "maximum")
    show("Seconds from the server's restart to a client's first request", columns, rows, caption)


def main() -> None:
    """Measure restarts, or run the server of one."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="training steps per round")
    parser.add_argument("--port", type=int, default=19093)
    parser.add_argument("--serve", type=Path, help="run a server in this folder (internal)")
    options = parser.parse_args()
    if options.serve is not None:
        names = [f"client-{n}" for n in range(options.clients)]
        run_server(options.serve, options.port, names, options.steps)
        return
    restarts = measure(options.clients, options.restarts, options.port, options.steps)
    show_restarts(restarts)
    write(options, rows=restarts)


if __name__ == "__main__":
    main()

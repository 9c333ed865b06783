"""Carry out run files with the `coterie` that PYTHONPATH names; benchmarks/same.py starts this.

It must work with the code of other commits, so it imports only names that have been stable. For
each run file, it appends a line of JSON to runs.jsonl: its name, seconds, and the error or null.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import coterie

COTERIE = [sys.executable, "-m", "coterie"]
LONGEST = 300
"""Seconds that a deployment's processes may take."""


def main() -> None:
    checkout, engine, inputs, out, *names = sys.argv[1:]
    source = Path(coterie.__file__)
    if not source.is_relative_to(Path(checkout, "src")):
        sys.exit(f"coterie is imported from {source}, not from {checkout}.")
    _ = coterie.run  # imports torch, which is not part of the first run's time
    for name in names:
        folder = Path(out, name)
        began, error = time.monotonic(), None
        try:
            run(engine, Path(inputs, f"{name}.yaml"), folder)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        line = {"name": name, "seconds": time.monotonic() - began, "error": error}
        with Path(out, "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def run(engine: str, file: Path, folder: Path) -> None:
    """Run one file in a folder that does not exist yet."""
    if engine == "processes":
        deploy(json.loads(file.read_text(encoding="utf-8")), folder)
    elif engine == "deployment":
        from coterie.testing.loop import deploy as deploy_here

        deploy_here(coterie.load_config(file), folder)
    elif engine == "faults":
        deploy_with_faults(coterie.load_config(file), folder)
    else:
        name: Any = engine
        coterie.run(coterie.load_config(file), out=folder, engine=name)


def deploy_with_faults(config: Any, folder: Path) -> None:
    """Start a run in one process, with faults.

    A client misses the first exchange. Another client's reply in the last exchange is lost, and the
    server is killed while it waits for this reply.
    """
    from coterie.testing import loop

    first, *_, late = sorted(client.name for client in config.clients)
    last, waits, killed = config.turns - 1, 0, False

    def lose(name: str, order: Any) -> bool:
        return not killed and (name, order.kind, order.turn) == (first, "step", last)

    def watch(network: loop.Loop) -> None:
        nonlocal waits, killed
        if any(order.kind == "step" and order.turn == 1 for _, order in network.orders):
            network.away.discard(late)
        waits += any((name, order.turn) == (first, last) for name, order in network.orders)
        if waits == 5 and not killed:
            killed = True
            raise Killed

    workers = loop.workers(config, folder)
    network = loop.Loop(workers, dict.fromkeys(range(1, 1000), watch), {late}, lose)
    with suppress(Killed):
        loop.server(config, folder / "server", network).rounds()
    network.reconnect(first)
    loop.server(config, folder / "server", network).rounds()


class Killed(Exception):
    """The server's process is killed."""


def deploy(values: dict[str, Any], folder: Path) -> None:
    """Start the server and each client of a run in processes of their own."""
    folder.mkdir()
    clients = {client["name"]: client["path"] for client in values["clients"]}
    texts = Path(values["data_root"])
    public = str(texts / values["data"]["public"])
    deployed = {key: value for key, value in values.items() if key != "data_root"}
    deployed["data"] = {**values["data"], "public": public}
    deployed["clients"] = [{"name": name} for name in clients]
    (folder / "run.yaml").write_text(json.dumps(deployed), encoding="utf-8")
    for words in (["init"], *(["add", name] for name in clients)):
        subprocess.run([*COTERIE, "keys", *words], cwd=folder, check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = {"server": ["server", "run.yaml", "--address", f"127.0.0.1:{port}", "--out", "run"]}
    for name, path in clients.items():
        where = ["--server", f"localhost:{port}", "--key", f"{name}.key", "--out", f"site-{name}"]
        options = ["--data", str(texts / path), "--base", values["base"], "--run", "run.yaml"]
        commands[name] = ["client", *where, *options, "--public", public]
    ended = together(commands, folder)
    if any(code != 0 for code in ended.values()):
        raise RuntimeError(f"exit codes {ended}; see the files *.out in {folder}")


def together(commands: dict[str, list[str]], folder: Path) -> dict[str, int | None]:
    """Run commands of Coterie at the same time; return their exit codes.

    Once one has failed, or after LONGEST seconds, the others are killed; their codes are None.
    """
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in commands.items():
            with (folder / f"{name}.out").open("wb") as file:
                running[name] = subprocess.Popen(
                    [*COTERIE, *words],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        until = time.monotonic() + LONGEST
        while True:
            codes = {name: process.poll() for name, process in running.items()}
            if None not in codes.values() or any(codes.values()) or time.monotonic() > until:
                return codes
            time.sleep(0.1)
    finally:
        for process in running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


if __name__ == "__main__":
    main()

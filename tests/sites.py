"""A deployment of real processes on loopback: started, watched, stopped, killed.

Run as a program, this is Coterie's command line with every message on tape, and with a rope that
holds a client in mid-round; see `taped`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from ports import die_with_parent, free_port

from coterie.network.keys import Keys
from coterie.runs import RunFolder
from coterie.turn import Turn

T = TypeVar("T")
COTERIE = [sys.executable, "-m", "coterie"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


class Program:
    """A process in a session of its own, with what it prints in a file."""

    def __init__(self, command: list[str], folder: Path, out: Path) -> None:
        self.out = out
        with out.open("ab") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            own: Any = {"start_new_session": True, "preexec_fn": die_with_parent(), **streams}
            self.process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, **own)

    @property
    def text(self) -> str:
        """All that was printed, by all lives of this process."""
        return self.out.read_text(encoding="utf-8")

    def send(self, number: int) -> None:
        """Send a signal to the whole process group, as Ctrl-C does in a terminal."""
        os.killpg(self.process.pid, number)

    def end(self, seconds: float = 60) -> int:
        """Wait for the exit code."""
        return self.process.wait(seconds)


class Deployment:
    """A server, its keys and clients, in a folder, from `with` to the end of its block.

    run: a run file's content; its clients have paths, which the server is not told.
    plugins: files that the server and every client are given with --plugin.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        taped: tuple[str, ...] = (),
        plugins: tuple[Path, ...] = (),
    ) -> None:
        self.folder, self.run, self.taped = folder, run, taped
        self.plugins = [word for plugin in plugins for word in ("--plugin", str(plugin))]
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        self.texts = {c["name"]: Path(run.get("data_root", "")) / c["path"] for c in run["clients"]}
        unnamed = {**run, "clients": [{"name": name} for name in self.texts]}
        unnamed.pop("data_root", None)
        (folder / "run.yaml").write_text(yaml.safe_dump(unnamed), encoding="utf-8")
        self.programs: dict[str, Program] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes that still run."""
        for name in self.programs:
            self.kill(name)

    def make_keys(self) -> None:
        """Create the server's folder of keys, and a key file for every client."""
        keys = Keys.create(self.folder / "keys")
        for name in self.texts:
            keys.add(name, self.folder / f"{name}.key")

    def serve(self, *options: str) -> Program:
        """Start the server, with new keys for all clients unless there are keys."""
        if not (self.folder / "keys").exists():
            self.make_keys()
        address = f"127.0.0.1:{self.port}"
        return self._start("server", ["server", "run.yaml", "--address", address, *options])

    def join(self, *names: str) -> None:
        """Start clients; the same again goes on where they were."""
        for name in names or self.texts:
            where = ["--server", f"localhost:{self.port}", "--out", f"site-{name}"]
            options = ["--key", f"{name}.key", "--data", str(self.texts[name]), "--run", "run.yaml"]
            options += ["--base", self.run["base"]] if Path(self.run["base"]).is_dir() else []
            self._start(name, ["client", *where, *options])

    def _start(self, name: str, arguments: list[str]) -> Program:
        command = COTERIE
        if name in self.taped:
            (self.folder / f"tape-{name}").mkdir(exist_ok=True)
            command = [sys.executable, __file__, str(self.folder / f"tape-{name}")]
        command = [*command, *arguments, *self.plugins]
        self.programs[name] = Program(command, self.folder, self.folder / f"{name}.out")
        return self.programs[name]

    def kill(self, name: str) -> None:
        """Kill a process."""
        self.programs[name].process.kill()
        self.programs[name].end()

    @property
    def server(self) -> RunFolder:
        """The server's folder."""
        return RunFolder(self.folder / "runs" / self.run["name"])

    def client(self, name: str) -> RunFolder:
        """Return the folder of a client that has joined."""
        [path] = (self.folder / f"site-{name}").glob(f"{name}-*")
        return RunFolder(path)

    def client_log(self, name: str) -> str:
        """Return the lines that all processes of a client logged."""
        return (self.folder / f"site-{name}/client-{name}.log").read_text(encoding="utf-8")

    def done(self) -> int:
        """Return the number of complete rounds."""
        return self.server.turns() if self.server.path.exists() else 0

    def wait(self, condition: Callable[[], T | None], seconds: float = 90) -> T:
        """Wait until something is true, for at most so long; returns it."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > end:
                tails = [f"{n}:\n{p.text[-1500:]}" for n, p in self.programs.items()]
                raise AssertionError("\n".join(["it never came", *tails]))
            time.sleep(0.02)
        return value

    def ends(self, seconds: float = 150) -> dict[str, int]:
        """Return all exit codes, once all processes have ended."""
        end = time.monotonic() + seconds
        codes = {n: p.end(max(1, end - time.monotonic())) for n, p in self.programs.items()}
        assert "did not receive the result" not in self.programs["server"].text
        return codes

    def rope(self, name: str, round: int = 0) -> Path:
        """Create a file that holds a client from a round on, until the file is deleted.

        A held client has trained, and has not yet saved or sent anything.
        """
        folder = self.folder / f"tape-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "held").unlink(missing_ok=True)
        (folder / "rope").write_text(str(round))
        return folder / "rope"

    def held(self, name: str, seconds: float = 90) -> None:
        """Wait until a rope holds a client."""
        self.wait((self.folder / f"tape-{name}" / "held").exists, seconds)

    def tape(self, name: str) -> list[bytes]:
        """Return every message that a program received or sent, in order."""
        return list(read_tape(self.folder / f"tape-{name}" / "tape"))


def assert_same_bits(deployment: Deployment, local: RunFolder) -> None:
    """Check that all states and scores are those of the local engine."""
    from coterie.testing.loop import assert_same_state  # the program does not find it

    pairs = {"server": deployment.server}
    pairs |= {f"client-{name}": deployment.client(name) for name in deployment.texts}
    for side, folder in pairs.items():
        assert_same_state(folder, local, side)
    for name in deployment.texts:
        result = deployment.client(name).result
        assert result is not None, name
        for point in ("trained", "aggregated"):
            assert result[point] == {name: local.result[point][name]}


def read_tape(path: Path) -> Iterator[bytes]:
    """Yield the messages on a tape."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "big")
        yield data[at + 8 : at + 8 + size]
        at += 8 + size


def taped(folder: Path) -> None:
    """Run Coterie's command line; what arrives and what is sent is appended to FOLDER/tape.

    While FOLDER/rope names this or an earlier round, a client that has trained waits and saves
    nothing yet, and says so by a file FOLDER/held.
    """
    from coterie.cli import main
    from coterie.deployment.client import Worker
    from coterie.engines.client_host import ClientHost
    from coterie.network.mailbox import Mailbox
    from coterie.network.order_files import Order

    def note(data: bytes) -> None:
        with (folder / "tape").open("ab") as tape:
            tape.write(len(data).to_bytes(8, "big") + data)

    answer, step = Worker.answer, ClientHost.step
    send, take = Mailbox.send, Order.take

    def answer_on_tape(self: Worker, data: bytes) -> bytes:
        note(data)
        reply = answer(self, data)
        note(reply)
        return reply

    def step_on_a_rope(
        self: ClientHost, turn: Turn, download: bytes, *, counted: bool = True
    ) -> bytes:
        upload = step(self, turn, download, counted=counted)
        rope = folder / "rope"
        with suppress(FileNotFoundError):
            while turn.round >= int(rope.read_text() or turn.round):
                (folder / "held").touch()
                time.sleep(0.02)
        return upload

    def send_on_tape(self: Mailbox, client: str, data: bytes, turn: int, seconds: float) -> str:
        note(data)
        return send(self, client, data, turn, seconds)

    def take_on_tape(self: Order) -> bytes:
        data = take(self)
        note(data)
        return data

    Worker.answer, ClientHost.step = answer_on_tape, step_on_a_rope
    Mailbox.send, Order.take = send_on_tape, take_on_tape
    main()


if __name__ == "__main__":
    taped(Path(sys.argv.pop(1)))

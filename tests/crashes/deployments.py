"""Deployments of forked processes on loopback, one of which is killed with SIGKILL.

The process that forks them imports PyTorch and Coterie, and starts no thread, so that a deployment
takes about a second.
"""

import ctypes
import gc
import importlib
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import certifi  # noqa: F401  (imported before the processes are forked)
import httpcore  # noqa: F401
from transformers import conversion_mapping

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.deployment.mailbox import MailboxServing, take_part
from coterie.deployment.site import Site
from coterie.deployment.start import serve, serve_again
from coterie.deployment.status import ServerWatch
from coterie.network import client as client_module
from coterie.network import mailbox as mailbox_module
from coterie.network import server as server_module
from coterie.network.keys import Credentials, Keys
from coterie.runs import RunFolder
from coterie.testing.small import small_values, write_base, write_texts
from crashes.client_states import CLIENT_STATES
from crashes.comparison import compare
from crashes.server_states import SERVER_STATES
from crashes.state import CLIENTS, ROUNDS, State
from crashes.ways import install

STATES = (*SERVER_STATES, *CLIENT_STATES)
INT8 = Path(__file__).parents[2] / "examples" / "transforms" / "int8.py"
SECONDS_IN_ALL = 60.0
"""The time after which a deployment counts as hanging."""
LONGEST_DELAY = 0.03
"""The maximum time in seconds between reaching a state and being killed."""
ABSENT = 1.2
"""The time in seconds after which the server notices that a client is silent."""
PORTS = range(10_000, 30_000)
"""The ports of servers; lower than those that the system gives to outgoing connections."""
PACKAGES = ("aggregation", "bases", "data", "evaluation", "methods", "training")
USED = (*(f"coterie.{package}" for package in PACKAGES), "datasketch", "scipy")
"""The beginnings of the names of modules that a process of a deployment imports when it runs."""
SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


@dataclass
class Outcome:
    """The outcome of a deployment with a killed process."""

    killed: int = 0
    """The number of processes that killed themselves with SIGKILL in the requested states."""
    difference: str = ""
    """The difference from the undisturbed run, or why the run did not end; empty if equal."""
    notes: list[str] = field(default_factory=list)
    """The last lines of the processes' outputs, if there is a difference."""


def shorten_times() -> None:
    """Reduce the intervals after which processes notice that others are gone or back."""
    mailbox_module.ABSENT_SECONDS = ABSENT
    server_module.POLL_SECONDS = 1.0
    server_module.PIECE = client_module.PIECE = 1 << 11
    client_module.HEARTBEAT_SECONDS = 0.4
    client_module.FIRST_PAUSE, client_module.LONGEST_PAUSE = 0.03, 0.15


class Stage:
    """The files that all deployments share: the base, the texts, the keys and the undisturbed run.

    Args:
        folder: The folder of these files, and of the deployments' folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        load_plugin(INT8)
        self.texts = write_texts(folder)
        finish(fork(lambda: write_base(folder / "base"), folder / "base.log"))
        run = small_values(
            folder / "base",
            self.texts,
            method={"name": "comigs-1g1s", "router": {"every": 2, "steps": 1}},
            rounds=ROUNDS,
            data={"window": 16, "limits": {"train": 400, "validation": 64, "test": 64}},
            clients=[{"name": name, "path": f"{name}.txt"} for name in CLIENTS],
            aggregation={"transforms": ["int8"], "optimiser": "fedadam", "largest_change": None},
            evaluation={"every": 1},
            deployment={"share_metrics": True, "checkpoints": 2, "deadline": SECONDS_IN_ALL},
        )
        self.config = parse(run)
        self.keys = Keys.create(folder / "keys")
        for name in CLIENTS:
            self.keys.add(name, folder / f"{name}.key")
        out, imports = folder / "local", folder / "imports"
        finish(fork(lambda: self.run_alone(out, imports), folder / "rehearsal.log"))
        for module in imports.read_text().split():
            importlib.import_module(module)
        conversion_mapping.get_checkpoint_conversion_mapping("gpt2")  # cached
        gc.collect()
        gc.freeze()
        self.undisturbed = Deployment(self, folder / "undisturbed", None, 0)
        outcome = self.undisturbed.run()
        assert not outcome.difference, (outcome.difference, outcome.notes)
        self.local = RunFolder(out)
        compare(self.undisturbed, self.undisturbed, self.local)

    def run_alone(self, out: Path, imports: Path) -> None:
        """Execute the run in one process, and write the names of the modules that it imports.

        The process that forks the others then imports these modules once.
        """
        before = {*sys.modules}
        coterie.run(self.config, out=out)
        names = [name for name in sys.modules if name.startswith(USED) and name not in before]
        imports.write_text("\n".join(names))

    def outcome(self, number: int, seed: int) -> Outcome:
        """Execute a deployment in which a process is killed, and compare it."""
        folder = self.folder / f"{number:02d}-{seed:02d}"
        deployment = Deployment(self, folder, STATES[number], seed)
        outcome = deployment.run()
        if not outcome.difference:
            try:
                compare(deployment, self.undisturbed, self.local)
            except Exception as error:
                outcome.difference = f"{type(error).__name__}: {error}"
        if outcome.difference:
            outcome.notes = [
                line
                for log in sorted(folder.rglob("*.log"))
                for line in log.read_text().splitlines()[-8:]
            ]
        else:
            shutil.rmtree(folder)
        return outcome


def fork(work: Callable[[], object], log: Path) -> int:
    """Execute some work in a process that ends with this one, and return its process id."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    parent = os.getpid()
    if (pid := os.fork()) > 0:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if os.getppid() == parent:
            work()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int) -> None:
    """Wait for a process to end without an error."""
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def free_port() -> int:
    """Return a port on loopback that nobody uses now."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class Deployment:
    """A deployment in which a process is killed, restarted, and left to continue to the end.

    Args:
        stage: The files that all deployments share.
        folder: The folder of the run folders and the processes' outputs.
        state: The state in which a process is killed; None: no process is killed.
        seed: The seed that chooses the client, the time it reaches the state, and the delays.
    """

    def __init__(self, stage: Stage, folder: Path, state: State | None, seed: int) -> None:
        self.stage, self.folder = stage, folder
        self.chance = random.Random(f"{state} {seed}")
        self.port = free_port()
        self.victim = ""
        self.kills: list[State] = []
        """The states in which the lives of the victim end, except for its last life."""
        if state is not None:
            self.victim = "server" if state.side == "server" else self.chance.choice(CLIENTS)
            self.kills = [state] if state.first is None else [state.first, state]
        self.pids: dict[int, str] = {}
        """The running processes, by process id."""
        self.lives: dict[str, int] = dict.fromkeys(("server", *CLIENTS), 0)
        """The number of times that each process was started."""
        self.ended: set[str] = set()
        self.recalled: set[str] = set()
        """Clients that are started again if they have left, because the server was killed: only
        the clients can repeat the metrics of the end of the run that the server has lost."""
        self.killed = 0

    def run(self) -> Outcome:
        """Execute the deployment until all processes have ended, and return its outcome."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        outcome, began = Outcome(), time.monotonic()
        try:
            for name in self.lives:
                self.start(name)
            while self.pids:
                self.follow()
                assert time.monotonic() < began + SECONDS_IN_ALL, "the run does not end"
            assert self.killed == len(self.kills), "no process was killed in this state"
        except AssertionError as error:
            outcome.difference = str(error)
        finally:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        outcome.killed = self.killed
        return outcome

    def start(self, name: str) -> None:
        """Start a process, which kills itself if a state is left in which it should be killed."""
        life = self.lives[name]
        self.lives[name] += 1
        self.ended.discard(name)
        self.recalled.discard(name)
        kill: Callable[[], None] = lambda: None  # noqa: E731
        if name == self.victim and life < len(self.kills):
            state, marker = self.kills[life], self.marker(life)
            occurrence = self.chance.randint(1, state.times)
            delay = self.chance.choice([0.0, self.chance.uniform(0, LONGEST_DELAY)])

            def kill() -> None:
                install(state.at, state.way, state.of, occurrence, delay, marker)

        work = self.serve if name == "server" else lambda: self.take_part(name)
        self.pids[fork(lambda: (kill(), work()), self.folder / f"{name}.log")] = name

    def marker(self, life: int) -> Path:
        """Return the file that the victim writes before it kills itself."""
        return self.folder / f"killed-{life}"

    def follow(self) -> None:
        """Wait for the end of a process, and start it again if it has killed itself."""
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            self.stop_finished()
            time.sleep(0.01)
            return
        name, code = self.pids.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0:
            self.ended.add(name)
            if name in self.recalled and "server" not in self.ended:
                self.start(name)
            return
        life = self.lives[name] - 1
        assert (name, code) == (self.victim, -signal.SIGKILL), f"{name} ended with {code}"
        assert self.marker(life).exists(), f"{name} was killed by another process"
        self.killed += 1
        time.sleep(self.chance.choice([0.0, self.chance.uniform(0, 0.3), 1.1 * ABSENT]))
        self.start(name)
        if name == "server":
            self.recalled.update(CLIENTS)
            for other in {*self.ended}:
                self.start(other)

    def stop_finished(self) -> None:
        """Stop a restarted client that has its result and waits for a server that has ended."""
        if "server" not in self.ended:
            return
        for pid, name in list(self.pids.items()):
            if self.lives[name] > 1 and self.client(name).result is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del self.pids[pid]

    def serve(self) -> None:
        """Serve the run, or continue it if it has begun, as `coterie server --resume` does."""
        address = f"127.0.0.1:{self.port}"
        serving = MailboxServing(ServerWatch(), keys=self.stage.keys, address=address)
        out = self.folder / "server"
        if (out / "run.json").exists():
            serve_again(out, serving)
        else:
            serve(self.stage.config, out, serving)

    def take_part(self, name: str) -> None:
        """Take part in the run as a client."""
        credentials = Credentials.load(self.stage.folder / f"{name}.key")
        text = str(self.stage.texts / f"{name}.txt")
        site = Site(
            name, {"path": text}, self.folder / name, base=self.stage.config.base.name, device="cpu"
        )
        take_part(f"localhost:{self.port}", credentials, site, lambda *_: None, threading.Event())

    @property
    def server(self) -> RunFolder:
        """The server's run folder."""
        return RunFolder(self.folder / "server")

    def client(self, name: str) -> RunFolder:
        """Return a client's run folder."""
        folders = [*(self.folder / name).glob(f"{name}-*/run.json")]
        return RunFolder(folders[0].parent if folders else self.folder / name / "missing")

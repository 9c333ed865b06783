"""The Flower app between real processes: a SuperLink and two SuperNodes, with TLS and keys."""

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from ports import die_with_parent, free_port

import coterie
from coterie.bases import EMBEDDED
from coterie.config.run import parse
from coterie.deployment.status import is_running
from coterie.network.keys import Keys
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_state, client_of, sides

pytestmark = pytest.mark.thorough
SOURCE = Path(coterie.__file__).parents[1]
PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "flower.md"
NAMES = {"alice": "poet", "bob": "whaler"}
RUN: dict[str, Any] = {
    "name": "us",
    "rounds": 3,
    "threads": 1,
    "base": "tiny-gpt2",
    "method": "comigs-1g1s",
    "training": {"steps": 2, "batch": 2},
    "data": {"window": 32, "limits": {"test": 2000}},
    "deployment": {"quorum": 2, "deadline": 600},
}


@pytest.fixture(scope="module", params=["1.23.0", "1.42.0"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a version of Flower, in an environment that also has our packages."""
    home = tmp_path_factory.mktemp("flower") / request.param
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin" / "pip", "install", "--quiet", f"flwr=={request.param}"]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    if installed.returncode:
        pytest.skip(f"flwr {request.param} cannot be installed: {installed.stderr[-200:]}")
    packages = next(home.glob("lib/python*/site-packages"))
    (packages / "zz.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return home / "bin"


class Federation:
    """A SuperLink and two SuperNodes on this machine.

    Args:
        folder: The folder of keys, texts, logs and Flower's own files.
        programs: The folder of Flower's programs.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.is_new = (programs / "flwr-agentapp").exists()
        self.processes: list[subprocess.Popen[bytes]] = []
        keys = Keys.create(folder / "keys").folder
        tls = ["--ssl-ca-certfile", keys / "ca.pem", "--ssl-certfile", keys / "server.pem"]
        tls += ["--ssl-keyfile", keys / "server.key", "--enable-supernode-auth"]
        self.port, fleet = free_port(), free_port()
        if self.is_new:
            tls += ["--disable-runtime-dependency-installation", "--port", self.port]
            fleet = self.port
        else:
            tls += ["--fleet-api-address", f"127.0.0.1:{fleet}"]
            tls += ["--control-api-address", f"127.0.0.1:{self.port}"]
            tls += ["--serverappio-api-address", f"127.0.0.1:{free_port()}"]
        self.start("link", "flower-superlink", *tls)
        shown = (
            PAGE.read_text(encoding="utf-8").partition("[superlink.us]\n")[2].partition("```")[0]
        )
        shown = shown.replace("flower.example.org:8000", f"localhost:{self.port}")
        self.connection = shown.replace("/etc/flower/ca.pem", f"{keys}/ca.pem")
        assert self.connection.count(str(self.port)) == self.connection.count(str(keys)) == 1
        self.wait(lambda: accepts(self.port) and accepts(fleet))
        (self.home("user") / "config.toml").write_text(f"[superlink.us]\n{self.connection}")
        self.write_app()
        for name, writer in NAMES.items():
            key = ec.generate_private_key(ec.SECP384R1())
            private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
            public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            (folder / name).write_bytes(private)
            (folder / f"{name}.pub").write_bytes(public)
            self.flwr("supernode", "register", folder / f"{name}.pub", *self.target())
            node = {"name": name, "data": EMBEDDED / "demo-writers" / f"{writer}.txt"}
            node |= {"folder": folder / f"{name}-runs", "run": folder / "us.yaml"}
            words = " ".join(f'{key}="{value}"' for key, value in node.items())
            options = ["--root-certificates", keys / "ca.pem", "--node-config", words]
            options += ["--superlink", f"localhost:{fleet}"]
            options += ["--auth-supernode-private-key", folder / name]
            if self.is_new:
                options += ["--port", free_port()]
            else:
                options += ["--auth-supernode-public-key", folder / f"{name}.pub"]
                options += ["--clientappio-api-address", f"127.0.0.1:{free_port()}"]
            self.start(name, "flower-supernode", *options)

    def target(self) -> list[object]:
        """Return the arguments of `flwr` that name the SuperLink."""
        return ["us"] if self.is_new else [self.folder / "app", "us"]

    def write_app(self) -> None:
        """Write the app with `coterie flower init`, as its documentation says."""
        (self.folder / "us.yaml").write_text(
            yaml.safe_dump({**RUN, "clients": [{"name": name} for name in NAMES]})
        )
        init = [sys.executable, "-m", "coterie", "flower", "init", "app", "--run", "us.yaml"]
        subprocess.run(
            [*init, "--out", "server"], cwd=self.folder, check=True, env=self.environment("user")
        )
        if not self.is_new:
            with (self.folder / "app" / "pyproject.toml").open("a") as project:
                project.write(f"\n[tool.flwr.federations.us]\n{self.connection}")

    def home(self, name: str) -> Path:
        """Return the folder of Flower's own files for a process."""
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process."""
        path = f"{self.programs}:{os.environ['PATH']}"
        own = {"PYTHONPATH": str(SOURCE), "FLWR_HOME": str(self.home(name)), "PATH": path}
        return {**os.environ, **own, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}

    def start(self, name: str, program: str, *options: object) -> None:
        """Start a program in a session of its own, whose output goes to a log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [self.programs / program, *map(str, options)],
                env=self.environment(name),
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self.processes.append(process)

    def flwr(self, *words: object) -> str:
        """Execute a command of `flwr`, and return its output."""
        done = subprocess.run(
            [self.programs / "flwr", *map(str, words)],
            env=self.environment("user"),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self) -> str:
        """Start the app with `flwr run`, and return the id that Flower gives to the run."""
        output = self.flwr("run", self.folder / "app", "us")
        match = re.search(r"run (\d{6,})", output)
        assert match, output
        return match[1]

    def wait(self, holds: Callable[[], object], seconds: float = 300) -> None:
        """Wait until something holds; fail with the logs if it does not."""
        end = time.monotonic() + seconds
        while not holds():
            logs = "\n".join(log.read_text()[-3000:] for log in self.folder.glob("*.log"))
            assert time.monotonic() < end, logs
            time.sleep(0.2)

    def end(self) -> None:
        """End all processes, also those that they started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def accepts(port: int) -> bool:
    """Return whether something listens on a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.fixture
def federation(programs: Path, tmp_path: Path) -> Iterator[Federation]:
    """A federation, which ends with the test."""
    made = None
    try:
        made = Federation(tmp_path, programs)
        yield made
    finally:
        if made is not None:
            made.end()


def test_a_stopped_federation_ends_in_the_local_bits(federation: Federation, tmp_path) -> None:
    server = RunFolder(tmp_path / "server")
    first = federation.run()
    federation.wait(lambda: server.checkpoints() and server.turns() >= 1)
    federation.flwr("stop", first, *federation.target())
    federation.wait(lambda: not is_running(server))
    assert server.result is None
    federation.run()
    federation.wait(lambda: server.result is not None)
    writers = EMBEDDED / "demo-writers"
    clients = [{"name": n, "path": str(writers / f"{w}.txt")} for n, w in NAMES.items()]
    local = RunFolder(coterie.run(parse({**RUN, "clients": clients}), out=tmp_path / "local").path)
    for side in sides(local):
        name = client_of(side)
        folder = next((tmp_path / f"{name}-runs").glob(f"{name}-*")) if name else server.path
        assert_same_state(RunFolder(folder), local, side)
        assert RunFolder(folder).result is not None

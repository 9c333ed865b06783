"""The engine ray with a cluster: addresses, shares of GPUs, and two nodes on loopback."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

import coterie
from coterie.engines.cluster import check_address, places, set_variables, share
from coterie.errors import CoterieError
from coterie.runs import RunFolder
from coterie.testing.loop import assert_same_states

ray: Any = pytest.importorskip("ray")


def unused(host: str) -> str:
    """Return an address at which nothing listens."""
    with socket.socket() as free:
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"


def test_an_address_where_nothing_answers_is_refused_at_once(values, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values()))
    address = unused("127.0.0.1")
    command = [sys.executable, "-m", "coterie", "run", str(file), "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--engine", "ray", "--address", address], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert " ".join(ended.stderr.split()) == (
        f"Error: The Ray cluster at {address} does not answer (Connection refused); check the "
        "address, or continue the run later with --resume."
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("address", ["auto", "localhost", "ray://localhost", "localhost:99999"])
def test_other_addresses_are_refused(address) -> None:
    with pytest.raises(CoterieError, match=r"HOST:PORT, not|does not answer"):
        check_address(address)


NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
    {"Alive": True, "Resources": {"CPU": 3.0, "memory": 1e9}},
    {"Alive": False, "Resources": {}},
]


@pytest.mark.parametrize(
    ("threads", "gpus", "workers"),
    [
        *[(1, 0, 11), (2, 0, 5), (4, 0, 2), (9, 0, 0), (1, 0.1, 8), (3, 0.1, 2)],
        *[(1, 0.4, 4), (1, 0.5, 4), (1, 0.6, 2), (1, 1, 2), (1, 2, 1), (1, 3, 0)],
    ],
)
def test_workers_have_cpus_and_gpus_of_one_machine(threads, gpus, workers, monkeypatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    assert places(threads, gpus) == workers


@pytest.mark.parametrize(
    ("device", "asked", "in_cluster", "gpus", "on"),
    [
        ("auto", None, 0, 0, "cpu"),
        ("auto", None, 3, 1, "cuda"),
        ("auto", 0.25, 3, 0.25, "cuda"),
        ("auto", 2, 3, 2, ("cuda:0", "cuda:1")),
        ("cpu", None, 3, 0, "cpu"),
        ("cuda:1", None, 3, 1, "cuda"),
        (("cuda:1", "cuda:2"), None, 3, 2, ("cuda:0", "cuda:1")),
    ],
)
def test_workers_use_their_own_gpus(device, asked, in_cluster, gpus, on, monkeypatch) -> None:
    resources = {"GPU": float(in_cluster)} if in_cluster else {}
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    assert share(device, asked) == (gpus, on)


@pytest.mark.parametrize(
    ("device", "asked", "reason"),
    [("auto", 0, "not 0"), ("auto", -1, "not -1"), ("auto", 1.5, "not 1.5"), ("cpu", 1, "is cpu")],
)
def test_a_share_of_gpus_that_does_not_exist_is_refused(device, asked, reason) -> None:
    with pytest.raises(CoterieError, match=f"--gpus .*{reason}"):
        share(device, asked)


def test_a_run_stops_if_no_worker_starts_in_time(monkeypatch) -> None:
    engine = import_module("coterie.engines.ray")
    monkeypatch.setattr(engine, "START", 0)
    monkeypatch.setattr(engine, "check_address", lambda address: None)
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: ([], tasks))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1"))
    pool = engine.Pool(lambda: ("worker", "reference"), 1)
    with pytest.raises(CoterieError, match="No worker could start within 0 seconds"):
        list(pool.answers([engine.Order("poet", "step", 0, True, b"", None, None)]))


def test_ray_that_was_imported_with_other_variables_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    with pytest.raises(CoterieError, match="has imported Ray before; use the engine `ray` in"):
        set_variables(None)
    set_variables("127.0.0.1:6379")
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.delitem(sys.modules, "ray")
    set_variables(None)
    assert (os.environ["RAY_AUTH_MODE"], len(os.environ["RAY_AUTH_TOKEN"])) == ("token", 64)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    set_variables(None)
    with pytest.raises(CoterieError, match="has started Ray itself"):
        set_variables("127.0.0.1:6379")


NODES_OF = """
import time, ray
from coterie.engines.cluster import check_address
from coterie.errors import CoterieError

for _ in range(60):
    try:
        check_address("{address}")
        ray.init("{address}", log_to_driver=False, configure_logging=False)
        break
    except CoterieError:
        time.sleep(1)
while len(ray.nodes()) < {count}:
    time.sleep(0.2)
"""


@pytest.fixture
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes with one CPU each, without a token."""
    program = [sys.executable, "-m", "ray.scripts.scripts"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    address = unused("127.0.0.2")
    started: list[subprocess.Popen[bytes]] = []
    with TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard", "false"]
        head += ["--node-ip-address", "127.0.0.2", "--temp-dir", folder]
        second = ["--address", address, "--node-ip-address", "127.0.0.3"]
        size = ["--num-cpus", "1", "--object-store-memory", str(2**27), "--block"]
        try:
            for node in (head, second):
                started.append(
                    subprocess.Popen(
                        [*program, "start", *node, *size],
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )
                nodes = [sys.executable, "-c", NODES_OF.format(address=address, count=len(started))]
                subprocess.run(nodes, env=environment, check=True, capture_output=True)
            yield address
        finally:
            for process in reversed(started):
                children = psutil.Process(process.pid).children(recursive=True)
                process.terminate()
                process.wait(60)
                for child in children:
                    child.kill() if child.is_running() else None


@pytest.mark.thorough
def test_a_cluster_of_two_nodes_gives_the_same_bits(cluster, values, tmp_path) -> None:
    file, run = tmp_path / "run.yaml", values(method="comigs-1g1s", evaluation={"every": 1})
    file.write_text(yaml.safe_dump(run))
    expected = coterie.run(run, out=tmp_path / "local")
    command = [sys.executable, "-m", "coterie", "run", str(file), "--out", str(tmp_path / "run")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    ended = subprocess.run(
        [*command, "--engine", "ray", "--address", cluster],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert_same_states(RunFolder(tmp_path / "run"), RunFolder(expected.path))

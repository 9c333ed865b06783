"""The engine ray: the local engine's bits and entries, whatever happens meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import psutil
import pytest
import yaml
from looped import assert_same

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import parse
from coterie.engines.local import LocalClients
from coterie.errors import CoterieError
from coterie.methods.contract import Method, Server
from coterie.methods.pretrained import PretrainedClient
from coterie.runs import Callback, RunFolder

RAY = "ray"
INT8 = Path(__file__).parents[2] / "examples" / "transforms" / "int8.py"
METHODS: dict[str, dict[str, Any]] = {
    "comigs": {"name": "comigs-1g1s", "router": {"every": 2, "steps": 1}},
    "pcl": {"name": "pcl-2", "warmup": 1, "every": 1, "validation_batches": 1},
}


def family() -> list[psutil.Process]:
    """Return this process and the processes of Ray."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def three_rounds(config: Callable[..., coterie.RunConfig], **changes: Any) -> coterie.RunConfig:
    """Return a run in which every worker receives an order after the round that `Kill` ends."""
    return config(method=METHODS["comigs"], rounds=3, evaluation={"every": 1}, **changes)


@pytest.fixture(scope="module")
def local(config, tmp_path_factory) -> RunFolder:
    """A run by the local engine that nothing happened to."""
    run = three_rounds(config)
    return RunFolder(coterie.run(run, out=tmp_path_factory.mktemp("local") / "run").path)


@pytest.mark.slow
def test_the_same_bits_and_figures_as_the_local_engine(config, tmp_path, capfd, monkeypatch):
    run = config(method=METHODS["pcl"], evaluation={"every": 1}, rounds=2)
    reachable: set[str] = set()

    class Listening(Callback):
        def on_round_end(self, round: int, scores: str) -> None:
            for process in family():
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        reachable.add(connection.laddr.ip)

    expected = coterie.run(run, out=tmp_path / "local")
    monkeypatch.setattr(LocalClients, "step", None)  # no other engine does the work
    done = coterie.run(run, out=tmp_path / "ray", engine=RAY, callbacks=[Listening()])
    assert_same(RunFolder(done.path), RunFolder(expected.path))
    assert not (done.path / "states").exists()
    # A table for people, and a model to write with, as after any run.
    assert done.table().markdown() == expected.table().markdown()
    assert coterie.load(done.path, "poet")
    # Ray lets nobody in from outside, says nothing, and is gone.
    assert reachable == {"127.0.0.1"} or reachable == {"127.0.0.1", "::ffff:127.0.0.1"}
    assert capfd.readouterr() == ("", "")
    assert [process for process in family() if "ray" in process.name()] == []


STOPPED = """
import os, signal, sys
import coterie
from coterie.runs import Callback

class Stop(Callback):
    def on_client_end(self, round, client):
        if (round, client) == (1, "diarist"):  # the others are at work
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            number = int(sys.argv[3])
            os.kill(os.getpid() if number == signal.SIGKILL else 0, number)

try:
    coterie.run(sys.argv[1], out=sys.argv[2], engine="ray", callbacks=[Stop()])
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("number", "code", "engine"),
    [
        # Ctrl-C reaches Ray's processes too; any engine goes on, or the one that it began with.
        pytest.param(signal.SIGINT, 130, "local", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, None, marks=pytest.mark.thorough),
    ],
)
def test_a_stopped_run_goes_on(number, code, engine, values, local, tmp_path, monkeypatch) -> None:
    run, out = tmp_path / "run.yaml", tmp_path / "out"
    three = values(method=METHODS["comigs"], rounds=3, evaluation={"every": 1})
    run.write_text(yaml.safe_dump(three))
    with TemporaryDirectory(ignore_cleanup_errors=True) as short:
        stopped = subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(run), str(out), str(int(number))],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": short},
            start_new_session=True,
        )
        assert stopped.communicate(timeout=240)[1] == ""
        assert stopped.returncode == code
        left = [p for p in psutil.process_iter() if session(p) == stopped.pid]
        # After a kill, two of Ray's helpers take up to a minute to see that they are alone.
        working = [p for p in left if number != signal.SIGKILL or "Agent" not in p.name()]
        assert psutil.wait_procs(working, timeout=60)[1] == []
    folder = RunFolder(out)
    assert (folder.turns(), folder.result) == (1, None)
    if engine is None:
        monkeypatch.setattr(LocalClients, "step", None)
    coterie.resume(out, engine=engine)
    assert_same(folder, local)


def session(process: psutil.Process) -> int:
    """Return the session that a process is in, or 0 if it has just ended."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def workers() -> list[psutil.Process]:
    """Return the processes of Ray's workers, whose command lines do not always name them."""
    actors = import_module("ray._private.state").actors().values()
    return [psutil.Process(actor["Pid"]) for actor in actors if actor["State"] == "ALIVE"]


def gcs_servers() -> list[psutil.Process]:
    """Return the processes without which a cluster is dead."""
    return [process for process in family() if "gcs_server" in " ".join(process.cmdline())]


class Kill(Callback):
    """Kill processes when the first client of the second round has finished.

    On a busy machine, the second worker may start only then; it is waited for.
    """

    def __init__(
        self, processes: Callable[[], list[psutil.Process]], count: int | None = None
    ) -> None:
        self.processes, self.count, self.killed = processes, count, 0

    def on_client_end(self, round: int, client: str) -> None:
        if round == 1 and not self.killed:
            until = time.monotonic() + 60
            while len(self.processes()) < (self.count or 1) and time.monotonic() < until:
                time.sleep(0.1)
            for process in self.processes()[: self.count]:
                process.kill()
                self.killed += 1


@pytest.fixture
def two_workers(monkeypatch) -> ModuleType:
    """The engine's module, with two workers for three clients."""
    engine = import_module("coterie.engines.ray")
    monkeypatch.setattr(engine, "processors", lambda: 2)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_workers_clients_are_repeated(count, config, local, tmp_path, two_workers) -> None:
    run, kill = three_rounds(config), Kill(workers, count)
    done = coterie.run(run, out=tmp_path / "run", engine=RAY, callbacks=[kill])
    assert kill.killed == count
    assert_same(RunFolder(done.path), local)
    assert (done.path / "ray.log").read_text().count("the worker is lost") == count


@pytest.mark.slow
def test_losing_every_worker_ends_a_run(config, local, tmp_path, two_workers, monkeypatch) -> None:
    monkeypatch.setattr(two_workers, "TRIES", 1)
    run, kill = three_rounds(config), Kill(workers)
    with pytest.raises(CoterieError, match=r"Client '\w+' failed: 1 workers were lost.*ray\.log"):
        coterie.run(run, out=tmp_path, engine=RAY, callbacks=[kill])
    assert "died" in (tmp_path / "ray.log").read_text()
    coterie.resume(tmp_path, engine="local")
    assert_same(RunFolder(tmp_path), local)


@pytest.mark.slow
def test_a_dead_cluster_ends_the_run(config, local, tmp_path, two_workers, monkeypatch) -> None:
    monkeypatch.setattr(two_workers, "CHECK", 0.01)
    run, kill = three_rounds(config), Kill(gcs_servers)
    with pytest.raises(
        CoterieError, match=r"cluster at 127\.0\.0\.1:\d+ does not answer.*--resume"
    ):
        coterie.run(run, out=tmp_path, engine=RAY, callbacks=[kill])
    stopped = RunFolder(tmp_path)
    assert stopped.turns() >= 1  # workers that already had an order may complete a round
    assert stopped.result is None
    coterie.resume(tmp_path, engine=RAY)
    assert_same(RunFolder(tmp_path), local)


@pytest.mark.slow
def test_an_error_in_a_worker_is_one_sentence(values, tmp_path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text((INT8).read_text())
    load_plugin(plugin)
    run = parse(values(aggregation={"transforms": ["int8"], "largest_change": None}))
    plugin.write_text(plugin.read_text() + "# changed\n")
    with pytest.raises(CoterieError, match=r"^The plugin .*mine\.py has changed since the run"):
        coterie.run(run, out=tmp_path / "run", engine=RAY)


@pytest.mark.slow
def test_workers_share_a_gpu(config, local, tmp_path, two_workers, monkeypatch) -> None:
    init, seen = two_workers.ray.init, set[int]()

    class Count(Callback):
        def on_client_end(self, round: int, client: str) -> None:
            seen.update(process.pid for process in workers())

    def with_gpu(**options: Any) -> None:
        init(**options, num_gpus=1)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray counts them
    monkeypatch.setattr(two_workers.ray, "init", with_gpu)
    monkeypatch.setattr(two_workers, "processors", lambda: 3)
    monkeypatch.setattr(two_workers, "share", lambda _, gpus: (gpus, "cpu"))  # no real GPU
    run = three_rounds(config, device="auto")
    done = coterie.run(run, out=tmp_path / "run", engine=RAY, gpus=0.5, callbacks=[Count()])
    assert_same(RunFolder(done.path), local)
    assert len(seen) == 2
    with pytest.raises(CoterieError, match="No machine has the 1 processor and 2 GPUs that a"):
        coterie.run(run, out=tmp_path / "more", engine=RAY, gpus=2)


def test_without_the_extra_it_says_what_to_install(config, tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "coterie.engines.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CoterieError) as error:
        coterie.run(config(), out=tmp_path / "run", engine=RAY)
    assert str(error.value) == (
        "The engine ray needs the package ray; install the extra: pip install 'coterie[ray]'."
    )
    assert not (tmp_path / "run").exists()


class Silent(Method):
    name = "silent"
    summary = "the base alone"

    def client(self, context):
        return PretrainedClient(context)

    def server(self, context):
        return Server()


def test_a_method_that_is_not_registered_is_refused(config, tmp_path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(CoterieError, match="cannot import the method 'silent'"):
        coterie.run(config(), method=Silent(), out=tmp_path / "run", engine=RAY)
    assert not (tmp_path / "run").exists()

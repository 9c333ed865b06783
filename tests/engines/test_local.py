"""The local engine: resumed runs, killed processes, order of clients, one process per client."""

import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from looped import StopAfter

import coterie
from coterie.bases import load_skeleton
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import State
from coterie.methods.contract import ServerContext
from coterie.runs import RunFolder
from coterie.testing.loop import assert_equal, assert_same_states


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Path:
    """A run that nothing happened to."""
    return coterie.run(config(), out=tmp_path_factory.mktemp("undisturbed") / "run").path


KILLED = """
import sys
from pathlib import Path
import coterie
from crashes.ways import before, install

at, count, run, out = sys.argv[1:]
install(at, before, lambda *_: True, int(count), 0.0, Path(run).with_suffix(".killed"))
coterie.run(run, out=out)
"""
RENAME, SYNC, UPDATE = "pathlib:Path.replace", "os:fsync", "coterie.training.update:Updater.update"


@pytest.mark.parametrize(
    ("at", "count", "every"),
    [
        pytest.param(UPDATE, 1, 1, marks=pytest.mark.thorough),  # before anything is saved
        (UPDATE, 14, 1),  # in the middle of the second round
        pytest.param(UPDATE, 14, 2, marks=pytest.mark.slow),
        pytest.param(SYNC, 5, 1, marks=pytest.mark.thorough),  # within the first
        # Just before a checkpoint becomes visible, or near it.
        pytest.param(RENAME, 8, 1, marks=pytest.mark.slow),
        pytest.param(SYNC, 14, 1, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_run_has_the_same_bits(at, count, every, values, undisturbed, tmp_path) -> None:
    run, out = tmp_path / "run.yaml", tmp_path / "out"
    run.write_text(yaml.safe_dump(values(checkpoint={"every": every})))
    arguments = [sys.executable, "-c", KILLED, at, str(count), str(run), str(out)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    assert subprocess.run(arguments, env=environment, timeout=120).returncode == -9
    assert not (out / "result.json").exists()
    resumed = coterie.resume(out)
    assert_same_states(RunFolder(out), RunFolder(undisturbed))
    before = RunFolder(undisturbed).result
    after = resumed.results["comigs-1g1s"]
    for key in ("trained", "aggregated", "traffic"):
        assert before is not None
        assert after[key] == before[key]


def test_the_order_of_clients_does_not_matter(config, undisturbed, tmp_path) -> None:
    run = config()
    session = Session(run)
    participants = session.participants(run)
    folder = RunFolder.create(tmp_path / "run", session.description(run, participants))
    local_run(run, session.base, participants[::-1], folder).run()
    assert_same_states(folder, RunFolder(undisturbed))


WORKER = """
import struct, sys
from pathlib import Path
import torch
from coterie.bases import load_base
from coterie.config.read import load_config
from coterie.messages import State
from coterie.methods.contract import ServerContext
from coterie.federation.participants import client_context, gathered

run, name, store = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.set_num_threads(1)
config = load_config(Path(run))
base = load_base(config.base, config.training.precision, config.data.window, config.root)
own = [client for client in config.clients if client.name == name]
alone = config.model_copy(update={"clients": own})  # with its own files, and nobody else's
[participant] = gathered(alone, base.tokenizer).clients
side = config.method.client(client_context(config, base, participant, lambda *_: None))
schema = config.method.schema()
if store.exists():
    side.restore(State.decode(store.read_bytes()))

def answer(data):
    sys.stdout.buffer.write(struct.pack("<Q", len(data)) + data)
    sys.stdout.buffer.flush()

answer(schema.send("hello", side.hello()))
while size := sys.stdin.buffer.read(8):
    message = schema.receive("down", sys.stdin.buffer.read(struct.unpack("<Q", size)[0]))
    side.receive(message)
    side.train(config.turn(message.exchange))
    upload = side.upload(config.turn(message.exchange))
    store.write_bytes(side.state().encode())
    answer(schema.send("up", upload))
"""


class Worker:
    """A client in a process of its own: it sees the bytes of messages and its own folder only."""

    def __init__(self, run: Path, name: str, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(run), name, str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.hello = self._read()

    def _read(self) -> bytes:
        assert self.process.stdout is not None
        size = int.from_bytes(self.process.stdout.read(8), "little")
        return self.process.stdout.read(size)

    def step(self, data: bytes) -> bytes:
        """Send a download, wait for the upload."""
        assert self.process.stdin is not None
        self.process.stdin.write(len(data).to_bytes(8, "little") + data)
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Let it end."""
        self.process.communicate(timeout=30)


@pytest.mark.slow
def test_each_client_in_a_process_of_its_own(values, config, undisturbed, tmp_path) -> None:
    # Every process finds a run file that names its own client and no other's text.
    names = ["diarist", "poet", "whaler"]
    workers: dict[str, Worker] = {}

    def start(name: str) -> None:
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        own = [{"name": name, "path": f"{name}.txt"}]
        (home / "run.yaml").write_text(yaml.safe_dump(values(clients=own)))
        workers[name] = Worker(home / "run.yaml", name, home / "state.safetensors")

    for name in names:
        start(name)
    run = config()
    # The server needs no weights and no text: names and shapes are enough.
    context = ServerContext(0, load_skeleton(run.base), tuple(names), lambda *_: None, run.training)
    server, schema = run.method.server(context), run.method.schema()
    exchange = Exchange(tmp_path, Pipeline((), schema, 1), schema, run.aggregation, strict=True)
    value = server.initial()
    for name in names:
        value = server.join(value, name, schema.receive("hello", workers[name].hello))
    for round in range(run.rounds):
        exchange.open(run.turn(round), names)
        exchange.begin()
        for name in names:
            download = schema.send("down", server.download(value, name, exchange))
            upload = schema.receive("up", workers[name].step(download))
            server.check(value, name, upload, exchange)
            exchange.put(name, upload, partial(server.reference, value, name))
        exchange.settle()
        value = server.aggregate(value, exchange)
        if round == 0:  # a client's process ends and another takes its place
            workers["poet"].stop()
            start("poet")
    for name in names:
        workers[name].stop()
        state = State.decode((tmp_path / name / "state.safetensors").read_bytes())
        assert_equal(state, RunFolder(undisturbed).load(f"client-{name}"), name)
    assert_equal(value.state(), RunFolder(undisturbed).load("server"), "server")


@pytest.mark.parametrize("method", ["comigs-1g1s", "fedavg", "centralized"])
def test_what_each_window_scored_is_kept_and_gives_the_score(method, config, tmp_path) -> None:
    run = coterie.run(config(method=method, rounds=2, evaluation={"every": 1}), out=tmp_path / "r")
    outcome = RunFolder(run.path).outcome
    assert outcome is not None
    for point in ("trained", "aggregated"):
        assert outcome["items"][point].keys() == outcome[point].keys() > {"poet", "whaler"}
        for name, score in outcome[point].items():
            items = outcome["items"][point][name]
            tokens = sum(items["tokens"])
            assert tokens == score["tokens"]
            assert math.exp(sum(items["nats"]) / tokens) == pytest.approx(score["perplexity"])


@pytest.mark.slow
def test_windows_of_the_same_text_have_one_name(config, tmp_path) -> None:
    def names(folder: str, **changes: Any) -> dict[str, str]:
        run = config(**{"method": "pretrained", "rounds": 1} | changes)
        outcome = RunFolder(coterie.run(run, out=tmp_path / folder).path).outcome
        assert outcome is not None
        return {name: items["of"] for name, items in outcome["items"]["trained"].items()}

    same, small = names("a"), config().data.model_dump()
    assert len(set(same.values())) == 3
    assert names("b", method="centralized", evaluation={"batch": 3}) == same
    validation, text = {"evaluation": {"split": "validation"}}, {"seed": 1}  # divided anew
    data = ({"data": small | change} for change in ({"window": 8}, {"limits": {"test": 300}}))
    for folder, changes in zip("cdef", (validation, text, *data), strict=True):
        assert names(folder, **changes) != same, changes


def test_one_base_in_memory(config) -> None:
    run = config()
    session = Session(run)
    local = local_run(run, session.base, session.participants(run), RunFolder(Path()))
    frozen = {p.data_ptr() for p in session.base.model.parameters()}
    for client in local.clients.values():
        model = client.model()
        assert model is session.base.model
        bare = {p.data_ptr() for name, p in model.named_parameters() if ".lora" not in name}
        assert frozen <= bare


def test_a_steps_gradient_is_no_longer_than_asked_for(config, tmp_path, monkeypatch) -> None:
    gradients: list[torch.Tensor] = []
    step = torch.optim.AdamW.step

    def noted(self: torch.optim.AdamW) -> None:
        (group,) = self.param_groups
        gradients.append(torch.cat([p.grad.flatten() for p in group["params"]]).clone())
        step(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    firsts = []
    for clip in (None, 1e-3, 1e3):
        gradients.clear()
        training = {"steps": 1, "batch": 2, "precision": "fp32", "max_grad_norm": clip}
        coterie.run(config(method="local", rounds=1, training=training), out=tmp_path / str(clip))
        firsts.append(gradients[0])
    free, clipped, short = firsts
    assert free.norm() > 1e-3
    assert torch.allclose(clipped, free * 1e-3 / free.norm(), rtol=1e-3, atol=1e-12)
    assert torch.equal(short, free)


def test_a_run_goes_on_before_a_damaged_checkpoint(config, undisturbed, tmp_path) -> None:
    with pytest.raises(KeyboardInterrupt):
        coterie.run(config(), out=tmp_path / "run", callbacks=[StopAfter(2)])
    folder = RunFolder(tmp_path / "run")
    path = folder.checkpoint(2) / "client-poet.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CoterieError, match=r"client-poet.* is damaged .* --from-round\."):
        coterie.resume(folder.path)
    with pytest.raises(
        CoterieError, match=r"No unfinished run in .* has a checkpoint later than round 7"
    ):
        coterie.resume(folder.path, from_round=7)
    coterie.resume(folder.path, from_round=1)
    assert_same_states(folder, RunFolder(undisturbed))
    assert [m["round"] for m in folder.metrics()] == sorted(m["round"] for m in folder.metrics())

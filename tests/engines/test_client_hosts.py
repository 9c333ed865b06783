"""A run holds a few clients in memory, and the states of the others on disk."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from looped import StopAfter, entries

import coterie
from coterie.config.plugins import load_plugin
from coterie.config.run import RunConfig
from coterie.engines.client_host import ClientHost
from coterie.engines.clients import STATES, NewStates
from coterie.runs import RunFolder
from coterie.runs.state_file import StateFile
from coterie.testing.rounds import joined, one_round

INT8 = Path(__file__).parents[2] / "examples/transforms/int8.py"


def test_a_run_continues_whatever_its_clients_are_called(config, tmp_path) -> None:
    """Continue a run whose transforms store client states and whose clients receive peers."""
    load_plugin(INT8)
    names = {"_": "poet", "0.b-": "whaler", "__" + 62 * "A": "diarist"}
    clients = [{"name": name, "path": f"{text}.txt"} for name, text in names.items()]
    run = config(method="auto", clients=clients, aggregation={"transforms": ["int8"]})
    coterie.run(run, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "stopped", callbacks=[StopAfter(2)])
    coterie.resume(tmp_path / "stopped")
    assert entries(RunFolder(tmp_path / "stopped")) == entries(RunFolder(tmp_path / "whole"))


def test_a_round_by_hand_gives_the_same_uploads(config, tmp_path, monkeypatch) -> None:
    """Train with and without client hosts; neither leaves a file in the working folder."""
    monkeypatch.chdir(tmp_path)
    rounds = []
    for free in (2**40, 0):
        monkeypatch.setattr("coterie.engines.local.free_memory", lambda free=free: free)
        local = joined(config())
        uploads = [one_round(local, round) for round in range(2)]
        rounds.append([{n: m.encode() for n, m in sent.items()} for sent in uploads])
        spilled = local.folder.path
        assert (spilled / STATES).exists() == (free == 0)
        del local
        assert not spilled.exists()
    assert rounds[0] == rounds[1]
    assert list(tmp_path.iterdir()) == []


def many(config: Any, texts: Path, folder: Path, count: int) -> RunConfig:
    """Return a run of several clients that have the same text."""
    names = [f"client-{number:02d}" for number in range(count)]
    for name in names:
        shutil.copy(texts / "poet.txt", folder / f"{name}.txt")
    clients = [{"name": name, "path": f"{name}.txt"} for name in names]
    return config(method="fedavg", clients=clients, data_root=str(folder), rounds=2)


@pytest.mark.parametrize(("free", "loaded"), [(8, 0), (3, 5 + 6 + 6), (0, 7 + 8 + 8)])
def test_free_memory_limits_clients(free, loaded, config, texts, tmp_path, monkeypatch) -> None:
    alive: WeakSet[ClientHost] = WeakSet()
    most, loads, written = 0, 0, Counter[str]()
    init, newest, write = ClientHost.__init__, NewStates.newest, StateFile.write

    def counted(self: ClientHost, *args: Any, **named: Any) -> None:
        nonlocal most
        init(self, *args, **named)
        alive.add(self)
        most = max(most, len(alive))

    def load(self: NewStates, client: str) -> Any:
        nonlocal loads
        loads += 1
        return newest(self, client)

    def written_once(folder: Path, name: str, data: bytes) -> StateFile:
        written[name] += 1
        return write(folder, name, data)

    run = many(config, texts, tmp_path, 8)
    size = joined(run).clients["client-00"].state().nbytes
    # A client in training has parameters, gradients and two moments. Clients get an eighth.
    monkeypatch.setattr("coterie.engines.local.free_memory", lambda: (free + 1) * 8 * 4 * size - 1)
    monkeypatch.setattr(ClientHost, "__init__", counted)
    monkeypatch.setattr(NewStates, "newest", load)
    monkeypatch.setattr(StateFile, "write", written_once)
    coterie.run(run, out=tmp_path / "run")
    assert most <= max(1, free) + (free < 8)  # one is created before another is removed
    # Two rounds and the last download; with space for three clients, two stay in memory.
    assert loads == loaded
    # Each state is written once.
    states = {name: n for name, n in written.items() if name.startswith("states/client-")}
    assert states == {f"states/client-{client.name}.new": 3 for client in run.clients}

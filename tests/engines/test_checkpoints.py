"""Checkpoints after every N-th round: the same bits, and nothing written twice."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_runs import HIGH, files
from looped import StopAfter, assert_same

import coterie
from coterie.config.run import RunConfig
from coterie.engines.client_host import ClientHost
from coterie.errors import CoterieError, Diverged
from coterie.messages import State
from coterie.runs import Callback, RunFolder
from coterie.runs.state_file import StateFile
from coterie.turn import Turn
from tests.written_runs import DESCRIPTION

ROUNDS = 5
DIVERGED = ("poet", 1)


@pytest.fixture(scope="module", autouse=True)
def _diverging() -> Iterator[None]:
    """The poet diverges once, after its training, in a round that has no checkpoint before it."""
    step = ClientHost.step

    def diverging(self: ClientHost, turn: Turn, *args: Any, **named: Any) -> bytes:
        upload = step(self, turn, *args, **named)
        if (self.name, turn.round) == DIVERGED:
            raise Diverged("the loss is not finite")
        return upload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientHost, "step", diverging)
        yield


@pytest.fixture(scope="module")
def run(config) -> Callable[..., RunConfig]:
    """A run in which a client diverges and uploads are refused, with a number of `every`."""
    training = HIGH | {"learning_rate": 0.3, "learning_rates": {"whaler": 3.0}}

    def make(every: int) -> RunConfig:
        return config(rounds=ROUNDS, training=training, checkpoint={"every": every})

    return make


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory) -> RunFolder:
    """The run with a checkpoint after every round."""
    folder = RunFolder(coterie.run(run(1), out=tmp_path_factory.mktemp("expected") / "run").path)
    left_out = (folder.result or {})["left_out"]
    assert left_out["poet"].keys() == {"2"}
    assert set(left_out["whaler"]) & {"2", "4"}  # without a checkpoint before them
    return folder


def assert_same_files(actual: RunFolder, expected: RunFolder) -> None:
    """Compare two runs, and their checkpoints byte by byte."""
    assert files(actual) == files(expected)
    assert_same(actual, expected)
    assert not (actual.path / "states").exists()


@pytest.mark.parametrize("free", [0, 2**40], ids=["one client in memory", "all in memory"])
@pytest.mark.parametrize(("every", "saved"), [(2, [2, 4, 5]), (3, [3, 5]), (9, [5])])
def test_the_result_is_the_same(every, saved, free, run, expected, tmp_path, monkeypatch) -> None:
    turns: list[int] = []
    save = RunFolder.save

    def counted(self: RunFolder, number: int, *args: Any, **named: Any) -> None:
        turns.append(number)
        save(self, number, *args, **named)

    monkeypatch.setattr(RunFolder, "save", counted)
    monkeypatch.setattr("coterie.engines.local.free_memory", lambda: free)
    done = coterie.run(run(every), out=tmp_path / "run")
    assert turns == saved
    assert_same_files(RunFolder(done.path), expected)


@pytest.mark.parametrize("stopped_after", [1, 3, 4])
def test_a_run_continues_from_its_last_checkpoint(stopped_after, run, expected, tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run(3), out=folder.path, callbacks=[StopAfter(stopped_after)])
    assert folder.turns() == (0 if stopped_after < 3 else 3)
    assert {line["round"] for line in folder.metrics()} == set(range(stopped_after))
    coterie.resume(folder.path)
    assert_same_files(folder, expected)


def test_only_files_of_checkpoints_are_flushed_to_disk(run, tmp_path, monkeypatch) -> None:
    flushed: dict[int, str] = {}
    at_work: list[set[str]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        flushed[os.fstat(descriptor).st_ino] = os.readlink(f"/proc/self/fd/{descriptor}")

    class Look(Callback):
        def on_round_end(self, round: int, scores: str) -> None:
            at_work.append({path.name for path in (folder.path / "states").glob("*")})

    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr(os, "fsync", noted)
    coterie.run(run(2), out=folder.path, callbacks=[Look()])
    assert not [path for path in flushed.values() if "/states/" in path]
    newest = folder.checkpoint(ROUNDS)
    assert {path.stat().st_ino for path in newest.iterdir()} <= flushed.keys()
    own = {f"client-{name}.safetensors" for name in ("diarist", "poet", "whaler")}
    assert [own <= names for names in at_work] == [True, False, True, False, False]
    assert at_work[1] == at_work[3] == at_work[4] == set()  # the checkpoint adopted them


def test_checkpoints_change_neither_the_digest_nor_what_clients_receive(run) -> None:
    assert run(4).digest() == run(1).digest()
    assert "checkpoint" not in run(4).visible_to("poet")


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", DESCRIPTION)


def stored(folder: RunFolder, text: str) -> StateFile:
    """Return a state that is stored outside the checkpoints."""
    data = State(values={"text": text}).encode()
    return StateFile.write(folder.path, "states/client-zed.new", data)


def test_a_checkpoint_adopts_a_state_without_reading_it(folder, monkeypatch) -> None:
    state = stored(folder, "words")
    monkeypatch.setattr(StateFile, "read", None)
    monkeypatch.setattr(State, "encode", None)
    folder.save(1, [("client-zed", state)])
    assert folder.load("client-zed").values == {"text": "words"}
    assert list((folder.path / "states").iterdir()) == []


def test_a_state_that_was_replaced_on_disk_is_damaged(folder) -> None:
    state = stored(folder, "words")
    (folder.path / state.name).write_bytes(State(values={"text": "forged"}).encode())
    folder.save(1, [("client-zed", state)])
    with pytest.raises(CoterieError, match=r"client-zed.safetensors is damaged"):
        folder.load("client-zed")


@pytest.mark.parametrize("linked", ["states", "states/client-zed.new"])
def test_a_checkpoint_adopts_no_link(linked, folder) -> None:
    folder.save(1, [("server", State())])
    state = stored(folder, "words")
    target, path = folder.path.parent / "elsewhere", folder.path / linked
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(CoterieError, match="is a symbolic link"):
        folder.save(2, [("client-zed", state)])
    with pytest.raises(CoterieError, match="is a symbolic link"):
        state.read()
    assert folder.turns() == 1


def test_a_state_that_is_gone_is_a_sentence(folder) -> None:
    state = stored(folder, "words")
    Path(folder.path / state.name).unlink()
    for use in (state.read, lambda: folder.save(1, [("client-zed", state)])):
        with pytest.raises(CoterieError, match=r"No such file"):
            use()
    assert not folder.checkpoints()

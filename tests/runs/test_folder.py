"""The run folder: never overwritten unasked, never half written, one process at a time."""

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

from coterie import CoterieError
from coterie.deployment.forgetting import check_participant
from coterie.files import write_json, write_text
from coterie.messages import State, names
from coterie.messages.formats import version_fields
from coterie.runs import Recorder, RunFolder
from coterie.turn import Turn
from tests.written_runs import CONFIG, DESCRIPTION


def line(round: int, value: float) -> dict:
    return {"round": round, "client": None, "name": "x", "value": value}


def content(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", DESCRIPTION)


@pytest.fixture
def full_disk(monkeypatch):
    """From when it is called on, nothing more can be made safe on the disk."""

    def fill() -> None:
        def fsync(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


def test_a_run_is_not_overwritten_unless_forced(folder) -> None:
    folder.append([line(0, 1.0)])
    folder.save(1, [("server", State())])
    folder.keep_items("trained", "ada", {"nats": [1.5]})
    with pytest.raises(CoterieError, match=r"already contains a run.*--resume .*--out.*--force"):
        RunFolder.create(folder.path, DESCRIPTION)
    assert folder.turns() == 1
    (folder.path / "thesis.txt").write_text("mine")
    RunFolder.create(folder.path, DESCRIPTION | {"threads": 2}, force=True)
    assert content(folder.path) == {".lock", "run.json", "thesis.txt"}
    assert folder.description["threads"] == 2


def test_an_outcome_has_what_was_kept_of_each_window_last(tmp_path) -> None:
    folder = RunFolder.create(tmp_path / "run", DESCRIPTION)
    folder.keep_items("trained", "a.b", {"nats": [9.0]})
    folder.keep_items("trained", "a.b", {"nats": [0.1, 2.5]})
    assert folder.outcome is None
    folder.finish({"reports": "trained"})
    items = {"trained": {"a.b": {"nats": [0.1, 2.5]}}}
    assert folder.outcome == {"reports": "trained", "seed": 0, "items": items}
    assert folder.result == {"reports": "trained"}


@pytest.mark.parametrize("name", ["thesis.txt", "run.json", ".bashrc"])
def test_a_folder_that_is_no_run_is_never_touched(name, tmp_path) -> None:
    (tmp_path / name).write_text('{"mine": true}')
    for force in (False, True):
        with pytest.raises(CoterieError, match="exists and is not a run folder"):
            RunFolder.create(tmp_path, DESCRIPTION, force)
    with pytest.raises(CoterieError, match="is not a run folder"):
        _ = RunFolder(tmp_path).description
    assert (content(tmp_path), (tmp_path / name).read_text()) == ({name}, '{"mine": true}')


def test_a_start_that_was_killed_can_begin_again(tmp_path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".run.json.123.tmp").write_text('{"con')
    assert RunFolder.create(tmp_path, DESCRIPTION).is_run


def test_only_one_process_works_in_a_folder(folder) -> None:
    with folder.lock():
        with pytest.raises(CoterieError, match="Another process is using"):
            RunFolder(folder.path).lock().__enter__()
        with pytest.raises(CoterieError, match="Another process is using"):
            RunFolder.create(folder.path, DESCRIPTION, force=True)
    assert folder.is_run
    with folder.lock():
        pass


@pytest.mark.parametrize("torn", ['{"round": 1, "cli', "\0\0\0", "\udcff"])
def test_a_torn_line_of_figures_is_left_out_and_then_gone(torn, folder) -> None:
    folder.append([line(0, 1.0), line(1, 2.0)])
    path = folder.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + torn.encode(errors="surrogateescape"))
    assert [metric["value"] for metric in folder.metrics()] == [1.0, 2.0]
    folder.forget_from(1)
    folder.append([line(1, 3.0)])
    assert [metric["value"] for metric in folder.metrics()] == [1.0, 3.0]


def test_a_recorder_writes_a_round_at_once(folder) -> None:
    seen = []
    recorder = Recorder(lambda *figure: seen.append(figure))
    recorder.log("poet", "loss", 4.0)
    recorder.log(None, "loss", 3.0, 7)
    assert seen == [(0, "poet", "loss", 4.0), (7, None, "loss", 3.0)]
    assert list(folder.metrics()) == []
    folder.append(recorder.take())
    folder.append(recorder.take())
    assert [metric["value"] for metric in folder.metrics()] == [4.0, 3.0]


def test_figures_are_dropped_by_the_round_in_which_they_came_up(folder) -> None:
    late = {**line(0, 2.0), "during": 1}  # of the first round, scored in the second
    folder.append([line(0, 1.0), late, line(1, 3.0), {**line(1, 4.0), "during": 2}, line(2, 5.0)])
    for round, left in ((3, [1, 2, 3, 4, 5]), (2, [1, 2, 3]), (1, [1]), (0, [])):
        folder.forget_from(round)
        assert [metric["value"] for metric in folder.metrics()] == left


DELETIONS = [
    ({}, ["first"]),
    ({"keep": None}, ["first"]),
    ({"keep": "bytes"}, ["first", "bytes/up"]),
    ({"keep": ""}, ["first", "nothing", "bytes/up"]),
]


@pytest.mark.parametrize(("options", "names"), DELETIONS)
def test_a_recorder_deletes_figures_except_those_with_a_prefix(options, names) -> None:
    recorder = Recorder(lambda *figure: None)
    recorder.log("poet", "first", 1.0)
    start = recorder.count
    recorder.log("poet", "nothing", 2.0)
    recorder.log("poet", "bytes/up", 3.0)
    recorder.undo(start, **options)
    assert [figure["name"] for figure in recorder.take()] == names


def test_a_recorder_says_when_a_figure_of_another_round_came_up(folder) -> None:
    recorder = Recorder(lambda *figure: None)
    recorder.turn = Turn(2, 2, 2)
    recorder.log("poet", "x", 1.0)
    recorder.log("poet", "x", 2.0, 2)
    recorder.log("poet", "x", 3.0, 1)
    figure = {"round": 2, "client": "poet", "name": "x"}
    assert recorder.take() == [
        figure | {"value": 1.0},
        figure | {"value": 2.0},
        figure | {"round": 1, "value": 3.0, "during": 2},
    ]
    assert recorder.take() == []


def save(folder, *rounds: int) -> None:
    for number in rounds:
        state = State({"g": {"w": torch.full((50,), float(number))}})
        folder.save(number, [("server", state)], files={"upload": b"bytes of an upload"})


def test_the_newest_checkpoint_counts_and_the_one_before_it_is_kept(folder) -> None:
    save(folder, 8, 9, 10)
    assert (folder.turns(), folder.load("server")["g"]["w"][0]) == (10, 10)
    assert [path.name for path in folder.checkpoints()] == ["00009", "00010"]
    with pytest.raises(CoterieError, match="has no state for 'client-zed'"):
        folder.load("client-zed")


@pytest.mark.parametrize("file", ["server.safetensors", "upload"])
def test_no_flipped_bit_of_a_checkpoint_is_read(folder, file) -> None:
    save(folder, 1, 2)
    path = folder.checkpoint(2) / file
    whole = path.read_bytes()
    words = rf"{file} is damaged .* go back to an earlier round with --from-round"
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(CoterieError, match=words):
            folder.read(file)
    path.write_bytes(whole)
    assert folder.read(file) == whole


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "no checksums": lambda path: path.with_name("checksums.json").unlink(),
    "none of this file": lambda path: path.with_name("checksums.json").write_text("{}"),
    "no JSON": lambda path: path.with_name("checksums.json").write_text("{"),
    "a folder": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_named(folder, damage) -> None:
    save(folder, 3)
    damage(folder.checkpoint(3) / "server.safetensors")
    with pytest.raises(CoterieError, match=r"00003/server.safetensors is damaged .* a new run"):
        folder.load("server")


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - {"divide"}))
def test_a_configuration_without_a_key_is_damaged(folder, key) -> None:
    kept = {name: value for name, value in CONFIG.items() if name != key}
    write_json(folder.path / "run.json", {**version_fields(), **DESCRIPTION, "config": kept})
    with pytest.raises(CoterieError, match=rf"run.json is damaged: config.{key}: Field required;"):
        _ = folder.description


def test_a_configuration_that_does_not_say_who_may_take_part_is_damaged(folder) -> None:
    described = {**DESCRIPTION, "run": "0", "config": CONFIG | {"deployment": {}}}
    write_json(folder.path / "run.json", {**version_fields(), **described})
    with pytest.raises(CoterieError, match=r"damaged: config.deployment.anyone: Field required;"):
        check_participant(folder, "poet")


def test_a_run_goes_back_to_a_checkpoint_that_is_kept(folder) -> None:
    save(folder, 4, 5)
    folder.finish({})
    with pytest.raises(CoterieError, match=r"no checkpoint of round 3 \(kept: 4, 5\)"):
        folder.go_back(3)
    folder.go_back(4)
    assert (folder.turns(), folder.result) == (4, None)
    assert folder.load("server")["g"]["w"][0] == 4


@pytest.mark.parametrize("linked", [True, False])
def test_a_state_that_is_as_before_is_not_written_again(linked, folder, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    state = State({"g": {"w": torch.ones(3)}})
    folder.save(1, [("kept-zed", state)])
    if not linked:
        monkeypatch.setattr(os, "link", refuse)
    for rounds in (2, 3, 3):  # the last one replaces its own checkpoint
        folder.save(rounds, [("kept-zed", None)], keep=2)
    newest = folder.checkpoint(3) / "kept-zed.safetensors"
    assert newest.read_bytes() == state.encode()
    assert newest.stat().st_nlink == (2 if linked else 1)  # that of round 2, too
    assert folder.find("kept-ann") is None


@pytest.mark.parametrize("renamed", [False, True])
def test_a_killed_change_can_be_repeated(renamed, folder, monkeypatch) -> None:
    folder.save(3, [("anna", State()), ("ben", State(values={"x": 1}))])
    (folder.path / "checkpoints/.00004.tmp").mkdir()  # another process was killed in `save`
    rename = Path.rename  # on POSIX, the same as `replace`

    def killed(path: Path, to: Path) -> Path:
        if path.is_dir() and not folder.checkpoints():
            raise KeyboardInterrupt
        return rename(path, to)

    def dropped(*_: object) -> None:
        raise KeyboardInterrupt

    def forget_anna() -> None:
        folder.change(lambda name, state: None if name == "anna" else state)

    with monkeypatch.context() as patch:
        if renamed:
            patch.setattr(RunFolder, "drop", dropped)
        else:
            patch.setattr(Path, "replace", killed)
            patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            forget_anna()
    assert (folder.path / "checkpoints/.00003.old").exists()
    assert len(folder.checkpoints()) == renamed
    with folder.lock():
        assert folder.states("") == (["ben"] if renamed else ["anna", "ben"])
        forget_anna()
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["00003"]
    assert folder.states("") == ["ben"]


def test_a_full_disk_leaves_the_last_checkpoint_and_no_rubbish(folder, full_disk) -> None:
    folder.save(1, [("server", State())])
    before = content(folder.path)
    full_disk()
    with pytest.raises(CoterieError, match=r"Could not write .*safetensors: No space left"):
        folder.save(2, [("server", State())])
    assert content(folder.path) == before
    with pytest.raises(CoterieError, match=r"Could not write .*metrics.jsonl: No space left"):
        folder.append([line(1, 1.0)])
    with pytest.raises(CoterieError, match=r"Could not write .*result.json: No space left"):
        folder.finish({})
    assert folder.result is None


def test_a_write_that_is_interrupted_leaves_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert (content(tmp_path), path.read_text()) == ({"a.txt"}, "old")


def test_a_place_where_nothing_can_be_written(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CoterieError, match=r"Could not write .*file/run: Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", DESCRIPTION)

    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(CoterieError, match=r"Could not write .*run: Permission denied\."):
        RunFolder.create(tmp_path / "run", DESCRIPTION)


def test_a_run_is_for_its_owner_alone(tmp_path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / ".lock").stat().st_mode) == 0o600


def test_a_lock_is_not_what_a_link_in_its_place_names(tmp_path) -> None:
    (tmp_path / "diary.txt").write_text("Dear diary")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "diary.txt")
    with pytest.raises(CoterieError, match=r"\.lock is a symbolic link"):
        RunFolder.create(tmp_path / "run", {})
    assert (tmp_path / "diary.txt").read_text() == "Dear diary"


METRICS = {value for name, value in vars(names).items() if name.isupper()}


@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_metric_with_a_value_of_another_kind_is_refused(name: str, folder: RunFolder) -> None:
    wrong = 1.5 if name == names.LEFT_OUT else "x"
    full = f"{name}1" if name.endswith("/") else name
    folder.append([{"round": 0, "client": "poet", "name": full, "value": wrong}])
    with pytest.raises(CoterieError, match=r"metrics\.jsonl, line 1, is damaged"):
        list(folder.metrics())

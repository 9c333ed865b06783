"""Trackers: what they have written, read back; and that a tracker cannot stop a run."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import coterie
from coterie import Callback
from coterie.config.deployed import load_deployment
from coterie.config.run import parse
from coterie.runs import RunFolder
from coterie.runs.trackers import TRACKERS, Tracker

SECRET = "The password of the safe is marzipan"
WORDS = (b"password", b"marzipan")
Series = dict[str, dict[int, float]]


class Stop(Callback):
    """Stops the run after a round, and notes warnings."""

    def __init__(self, round: int | None = None) -> None:
        self.round, self.warnings = round, []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)

    def on_round_end(self, round: int, scores: str) -> None:
        if round == self.round:
            raise KeyboardInterrupt


@pytest.fixture
def secret(values, tmp_path) -> Any:
    """Return a run on texts that contain a secret sentence, as plain data."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("anna", "ben"):
        text = "".join(f"{SECRET}, and {name} keeps it for {n} days.\n\n" for n in range(150))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    clients = [{"name": name, "path": f"{name}.txt"} for name in ("anna", "ben")]

    def make(**changes: Any) -> dict[str, Any]:
        return values(clients=clients, data_root=str(folder), rounds=3, **changes)

    return make


def events(folder: Path) -> Series:
    """Return the values in a folder of event files, by tag and step.

    A record is a length, its checksum, the data, and their checksum.
    """
    from tensorboardX.proto import event_pb2

    module: Any = event_pb2
    series: Series = {}
    for file in sorted(folder.glob("*tfevents*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = module.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                steps = series.setdefault(value.tag, {})
                assert event.step not in steps, "a step was written twice"
                steps[event.step] = value.simple_value
    return series


def expected(path: Path) -> Series:
    """Return the numbers in metrics.jsonl by tag and step."""
    numbers: dict[str, dict[int, list[float]]] = {}
    for line in RunFolder(path).metrics():
        for tag, number in parts(line):
            numbers.setdefault(tag, {}).setdefault(line["round"] + 1, []).append(number)
    means = [{step: fmean(values) for step, values in steps.items()} for steps in numbers.values()]
    return dict(zip(numbers, means, strict=True))


def parts(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    name, value, client = line["name"], line["value"], line["client"]
    suffix = "" if client is None else f"/{client}"
    if isinstance(value, dict):
        yield from ((f"{name}/{key}{suffix}", part) for key, part in value.items())
    elif isinstance(value, list):
        yield from ((f"{name}/{n}{suffix}", part) for n, part in enumerate(value))
    elif not isinstance(value, str):
        yield f"{name}{suffix}", value


def assert_same(series: Series, path: Path) -> None:
    wanted = expected(path)
    assert series.keys() == wanted.keys()
    for tag, steps in wanted.items():
        assert series[tag] == pytest.approx(steps, rel=1e-6), tag
    assert {"loss/experts/anna", "test/trained/perplexity/ben", "bytes/up/anna"} <= {*series}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def assert_no_text(paths: list[Path]) -> None:
    assert paths
    for path in paths:
        assert not [word for word in WORDS if word in path.read_bytes()], path


def test_event_files_have_the_numbers_of_each_run_and_no_text(secret, tmp_path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    run = secret(trackers=["tensorboard"], baselines=["local"])
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "run", callbacks=[Stop(1)])
    coterie.resume(tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / "baselines" / "local"):
        assert_no_text(files(path / "tensorboard"))
        series = events(path / "tensorboard")
        if path.name == "run":
            assert_same(series, path)
        assert {*series["seconds"]} == {1, 2, 3}
    inner = tmp_path / "run" / "baselines" / "local" / "tensorboard"
    assert len(files(inner)) == 2  # one for each process; the first was stopped in this baseline
    coterie.run(secret(), out=tmp_path / "run", force=True)
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_comparisons_are_tracked(secret, tmp_path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra `tensorboard` is not installed")
    coterie.compare(secret(trackers=["tensorboard"]), ["local", "fedavg"], out=tmp_path / "all")
    folders = sorted((tmp_path / "all").glob("*/tensorboard"))
    assert [folder.parent.name.partition("-")[0] for folder in folders] == ["fedavg", "local"]
    assert all(events(folder)["seconds"].keys() == {1, 2, 3} for folder in folders)


def test_a_failing_tracker_warns_once_and_changes_nothing(secret, tmp_path, monkeypatch) -> None:
    class Broken(Tracker):
        name = "tensorboard"

        def open(self, run: Any) -> None:
            pass

        def write(self, round: int, numbers: Any) -> None:
            raise OSError("no space left")

    plain = coterie.run(secret(), out=tmp_path / "plain")
    monkeypatch.setitem(TRACKERS, "tensorboard", Broken)
    follower = Stop()
    run = secret(trackers=["tensorboard"])
    tracked = coterie.run(run, out=tmp_path / "run", callbacks=[follower])
    warnings = [text for text in follower.warnings if "tracker" in text]
    assert warnings == [
        "Warning: the tracker tensorboard failed (OSError: no space left); the run continues "
        "without it."
    ]
    scores = [RunFolder(each.path).result or {} for each in (plain, tracked)]
    assert scores[0]["trained"] == scores[1]["trained"]
    assert parse(secret()).digest() == parse(run).digest()


def test_a_missing_package_is_reported_before_the_run(secret, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(coterie.CoterieError, match=r"The tracker wandb needs .*coterie\[wandb\]"):
        coterie.run(secret(trackers=["wandb"]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_deployment_has_no_trackers(secret) -> None:
    config = load_deployment(secret(trackers=["tensorboard"]), ["anna", "ben"])
    assert config.trackers == ()
    assert "trackers" not in config.visible_to("anna")


READER = """
import json, struct, sys
from wandb.proto.wandb_internal_pb2 import Record

rows, runs = [], set()
for path in sys.argv[1:]:
    data, at, message = open(path, "rb").read(), 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # blocks of LevelDB's log format end with a padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (2, 3):  # the first or a middle part of a record
            continue
        record, message = Record.FromString(message), b""
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json)
                         for item in items})
        elif kind == "run":
            runs.add((record.run.run_id, record.run.display_name, record.run.run_group))
print(json.dumps([rows, sorted(runs)]))
"""


@pytest.mark.thorough
def test_wandb_receives_the_same_numbers(secret, tmp_path) -> None:
    # wandb has many dependencies, so it is installed in another environment.
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin" / "pip", "install", "--quiet", "wandb>=0.19,<1"]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"wandb cannot be installed: {installed.stderr[-200:]}")
    (folder,) = home.glob("lib/python*/site-packages")
    (folder / "ours.pth").write_text("\n".join(path for path in sys.path if path), "utf-8")
    (tmp_path / "run.yaml").write_text(json.dumps(secret(trackers=["wandb"])), "utf-8")
    environment = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}

    def execute(*arguments: object) -> str:
        options: Any = {"env": environment, "capture_output": True, "text": True, "cwd": tmp_path}
        done = subprocess.run([home / "bin" / "python", *map(str, arguments)], **options)
        assert done.returncode == 0, done.stderr
        assert "tracker" not in done.stderr + done.stdout
        return done.stdout

    stop = "import coterie, sys; sys.path.insert(0, sys.argv[1]); import test_trackers as t\n"
    stop += "try: coterie.run('run.yaml', out='run', callbacks=[t.Stop(1)])\n"
    stop += "except KeyboardInterrupt: pass"
    execute("-c", stop, Path(__file__).parent)
    execute("-m", "coterie", "run", "--resume", "run")
    written = sorted((tmp_path / "run").rglob("*.wandb"))
    assert len(written) == 2  # one for each process
    rows, runs = json.loads(execute("-c", READER, *written))
    assert [(name, group) for _, name, group in runs] == [("run", "run")]  # one run, one id
    series: Series = {}
    for row in rows:
        for tag, value in row.items():
            if not tag.startswith("_") and tag != "round":
                assert row["round"] not in series.setdefault(tag, {})
                series[tag][row["round"]] = value
    assert_same(series, tmp_path / "run")
    assert_no_text(files(tmp_path / "run" / "wandb"))

"""Whatever a run folder holds, a command that reads it succeeds or says what is wrong."""

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from written_runs import COMMANDS

from coterie import api
from coterie.cli import app
from coterie.config.run import parse
from coterie.errors import CoterieError
from coterie.runs.folder import CHECKSUMS
from coterie.runs.state_file import checksum

ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, 10**30, "", "x", "../x", "é" * 300, [], [1], {}, {"a": 1}, [[[]]]),
    *({"name": 3}, ["x"], {"perplexity": "x"}, {"perplexity": {}}, [None], "1e999", float("inf")),
]
"""Values that a key does not have."""
RAW = [
    *(b"", b"{", b"null", b"3", b'"x"', b"[]", b"{}", b"[" * 100_000, b"\xff\xfe{}", b"\0" * 50),
    *(b'{"a": ' * 3000 + b"1" + b"}" * 3000, b"9" * 5000, b'{"config": ' + b"9" * 5000 + b"}"),
]
"""Damaged contents of a whole file."""


def replaced(value: Any, rng: random.Random) -> Any:
    """Return JSON in which one value, however deep, is another, or its key is missing."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: replaced(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], replaced(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD)


def damage(file: Path, rng: random.Random) -> str:
    """Overwrite a part of one file at random, and return a description of the change."""
    data = file.read_bytes()
    kinds = ["raw", "cut", "folder", "link", "pipe", "missing", "bit"]
    if file.suffix in (".json", ".jsonl"):
        kinds += ["value"] * 10
    kind = rng.choice(kinds)
    match kind:
        case "value" if file.suffix == ".json":
            file.write_text(json.dumps(replaced(json.loads(data), rng)))
        case "value":
            lines = data.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(replaced(json.loads(lines[at]), rng)).encode()
            file.write_bytes(b"\n".join(lines) + b"\n")
        case "raw":
            file.write_bytes(rng.choice(RAW))
        case "cut":
            file.write_bytes(data[: rng.randrange(len(data))])
        case "bit":
            at = rng.randrange(len(data))
            file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        case _:
            file.unlink()
            if kind == "folder":
                file.mkdir()
            elif kind == "link":
                file.symlink_to("/etc/passwd")
            elif kind == "pipe":
                os.mkfifo(file)
    return kind


@pytest.fixture(scope="module")
def finished(values, tmp_path_factory) -> Path:
    """The folder of a short finished run, with the log and the lists of a deployed server."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    api.run(parse(values(rounds=2, method="fedavg", evaluation={"every": 1})), out=folder)
    (folder / "server.log").write_text("poet is here\n")
    for name in ("without.json", "received.json"):
        (folder / name).write_text('{"clients": ["whaler"]}')
    return folder


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (0, 16),
        pytest.param(1, 200, marks=pytest.mark.slow),
        pytest.param(2, 1000, marks=pytest.mark.thorough),
    ],
)
def test_damaged_run_folders_are_read_or_refused(seed, count, finished, tmp_path) -> None:
    rng, outcomes = random.Random(seed), Counter[str]()
    files = sorted(p.relative_to(finished) for p in finished.rglob("*") if p.is_file())
    files = [p for p in files if p.name != ".lock"] + [Path("run.json"), Path("metrics.jsonl")] * 3
    for number in range(count):
        run = tmp_path / f"run-{number}"
        shutil.copytree(finished, run)
        file = rng.choice(files)
        kind = damage(run / file, rng)
        if file.suffix == ".safetensors" and rng.random() < 0.5 and (run / file).is_file():
            resealed(run / file)
        command = list(COMMANDS.values())[number % len(COMMANDS)].format(run)
        result = CliRunner().invoke(app, command, input="")
        text = (run / file).read_bytes()[:2000] if (run / file).is_file() else b""
        where = f"{command} on {file} ({kind}): {text!r}"
        match result.exception:
            case None:
                outcomes["done"] += 1
            case CoterieError() | OSError() | SystemExit():
                outcomes["refused"] += 1
                assert "\n" not in str(result.exception).rstrip(), where
            case error:
                raise AssertionError(f"{error!r}: {where}") from error
        shutil.rmtree(run)
    assert min(outcomes["done"], outcomes["refused"]) > count / 20, outcomes  # both happen


def resealed(file: Path) -> None:
    """Make a checkpoint's checksum that of what a file now holds."""
    sums = json.loads((file.parent / CHECKSUMS).read_bytes())
    sums[file.name] = checksum(file.read_bytes())
    (file.parent / CHECKSUMS).write_text(json.dumps(sums))

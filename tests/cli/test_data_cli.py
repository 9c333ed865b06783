"""`coterie data`, as a stranger uses it."""

import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from coterie.cli import app


@pytest.fixture(autouse=True)
def _narrow(monkeypatch) -> None:
    monkeypatch.setattr("coterie.cli.terminal.console", Console(width=80))


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def run_file(bases, tmp_path) -> Path:
    """Two clients with records of their own; one trains on a test text of the other."""
    for name in ("ann", "ben"):
        for split in ("train", "validation", "test"):
            texts = [f"This is what {name} wrote for {split} on day {day}." for day in range(9)]
            texts += ["Hi.", " "] if (name, split) == ("ann", "train") else []
            texts += ["This is what ann wrote for test on day 3."] * (name == "ben" != split)
            lines = [json.dumps({"text": text}) for text in texts]
            (tmp_path / f"{name}-{split}.jsonl").write_text("\n".join(lines))
    splits = ("train", "validation", "test")
    clients = [{"name": n} | {s: f"{n}-{s}.jsonl" for s in splits} for n in ("ann", "ben")]
    values = {"base": str(bases / "gpt2"), "data": {"window": 16}, "clients": clients}
    (tmp_path / "us.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "us.yaml"


def test_sizes_and_copies_by_client_and_split(run_file, tmp_path) -> None:
    out = said(run_file, "--json", tmp_path / "found.json")
    rows = dict(re.findall(r"^(\w+ (?:train|validation|test)) +([\d,].*?) *$", out, re.MULTILINE))
    assert set(rows) == {
        f"{n} {s}" for n in ("ann", "ben") for s in ("train", "validation", "test")
    }
    assert "left out: 1." in " ".join(out.split())
    assert re.search("ann test 4 is ben train 10: This is what ann wrote for test on day 3.", out)
    assert max(map(len, out.splitlines()[:12])) <= 80
    found = json.loads((tmp_path / "found.json").read_text())
    by_split = {(s["client"], s["split"]): s for s in found["splits"]}
    assert by_split["ann", "train"]["short"] == 1
    assert by_split["ann", "train"]["texts"] == 10
    assert by_split["ann", "test"]["exact"]["in_others"] == 1
    assert by_split["ben", "validation"]["exact"]["in_training"] == 1
    assert found["empty"] == 1
    assert found["compared"] is None


def test_labels_are_counted_where_texts_are_divided(bases, tmp_path) -> None:
    lines = [
        json.dumps({"label": label, "text": f"A text of {label}, number {n}, and no other."})
        for label in ("news", "talk")
        for n in range(100)
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines))
    divide = {"source": "all.jsonl", "by": "label"}
    values = {"base": str(bases / "gpt2"), "data": {"window": 16}, "divide": divide}
    (tmp_path / "us.yaml").write_text(yaml.safe_dump(values))
    out = said(tmp_path / "us.yaml")
    assert re.search(r"^news +80 +0 *$", out, re.MULTILINE)
    assert re.search(r"^talk +0 +80 *$", out, re.MULTILINE)
    assert said(tmp_path / "us.yaml") == out

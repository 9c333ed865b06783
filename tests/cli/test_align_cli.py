"""`coterie align`, as a stranger uses it."""

import json
import re
from pathlib import Path

import pytest


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Two small vocabularies, and a cache of the test's own."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    a = {"a": 0, "bb": 1, "ccc": 2, "Ċ" * 60: 3, "<|endoftext|>": 4}
    b = {"a": 0, "b": 1, "cccc": 2, "Ċ": 3, "<s>": 4, "<pad>": 5}
    for name, ids in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
    return tmp_path


def test_both_ways_with_worst_cases_and_roles(files, succeeds) -> None:
    out = succeeds("align", files / "a.json", files / "b.json", "--json", files / "out.json")
    for line in (
        r"A is .*a\.json: 5 tokens",
        r"^A -> B +25\.0% +1 +2 +0 +0 +1 +15\.25 +\d\.\d s",
        r"^B -> A +25\.0% +1 +3 +0 +0 +0 +0\.75 +\d\.\d s",
        r'^"(\\n){14}\\?…" +"\\n" +59 *$',
        r"^bos +- +4 +- +4 -> 4 *$",
        r"^eos +4 +- +4 -> 4 +- *$",
        r"^pad +- +5 +- +5 -> 4 *$",
    ):
        assert re.search(line, out, re.MULTILINE), line
    assert max(map(len, out.splitlines())) <= max(80, len(str(files)) + 30)
    figures = json.loads((files / "out.json").read_text())
    assert figures["tokens"] == {"A": 5, "B": 6}
    forward = figures["A -> B"]
    assert forward["histogram"] == [1, 2, 0, 0, 1]
    assert forward["exact"] == 0.25
    token = {"id": 3, "token": '"' + r"\n" * 60 + '"', "edited": 59}
    assert forward["worst"][0] == {**token, "nearest_id": 3, "nearest": r'"\n"'}
    assert [case["edited"] for case in figures["B -> A"]["worst"]] == [1, 1, 1]


def test_the_second_time_maps_come_from_the_cache(files, succeeds) -> None:
    pair = ("align", files / "a.json", files / "b.json", "--worst", 0)
    succeeds(*pair, "--no-cache")
    assert not (files / "cache").exists()
    first, again = succeeds(*pair), succeeds(*pair)
    assert not re.search("Worst matches|cache", first)
    assert re.search(r"A -> B .* cache", again)
    assert re.search(r"B -> A .* cache", again)
    assert "cache" not in succeeds(*pair, "--no-cache")


def test_a_tokenizer_that_cannot_be_read_is_one_sentence(files, refuses) -> None:
    (files / "c.json").write_text("[]")
    for bad in (files / "c.json", files):
        refuses(str(bad), "align", files / "a.json", bad)

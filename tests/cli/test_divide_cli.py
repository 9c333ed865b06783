"""`coterie divide` writes files from which a run reads what the section `divide` would give it."""

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml

from coterie.bases import load_tokenizer
from coterie.config.read import load_config
from coterie.config.run import RunConfig
from coterie.federation.participants import Federation, Participant, gathered

ANSWERS = ("yes", "no", "perhaps")
ASKED = {"instructions": {"template": "{{ question }}?", "answer": "answer"}}
DATED = {"instructions": {"template": "{% if when %}{{ text }}{% endif %}"}}
TITLED = {"template": "{{ text }}", "answer": "title"}
TALKS = {"messages": {"field": "turns"}}
EVEN = {"by": "even", "clients": 3, "public": True}
DIRICHLET = {"by": "dirichlet", "clients": 3, "alpha": 5}


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """A folder with 240 records of three labels, and a text file for each of two more labels."""
    draw = random.Random(0)
    lines = []
    for number in range(240):
        words = " ".join(draw.choices(("ship", "storm", "whale", "café", "lay\u2028to"), k=4))
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "Aye."}]
        record = {"label": f"l/{number % 3}", "text": words, "title": f"Day {number}"}
        record |= {"question": words, "answer": draw.choice(ANSWERS), "turns": turns}
        record |= {"prompt": words, "chosen": "Aye.", "rejected": "Nay."}
        lines.append(json.dumps(record))
    (tmp_path / "news.jsonl").write_text("\n".join(lines))
    for name in ("day", "night"):
        text = "\n".join(f"{name} {number}: all was well." for number in range(600))
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def write_run(folder: Path, base: Path, divide: dict[str, Any], **changes: Any) -> Path:
    """Write a run file, and return its path."""
    data = {"window": 32, **changes.pop("data", {})}
    values = {"base": str(base), "data": data, "divide": {"source": "news.jsonl", **divide}}
    values |= {"rounds": 1, "threads": 1, "training": {"steps": 2, "batch": 2}, "clients": []}
    values |= changes
    path = folder / "news.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def read(config: RunConfig) -> Federation:
    return gathered(config, load_tokenizer(config.base, config.root))


def questions(participant: Participant) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return the texts, contents and choices of a participant's training samples."""
    return [(q.text, q.content, q.choices) for q in participant.data.train.questions]


DIVISIONS = [
    ({"by": "label"}, {"text": ["title", "text"], "limits": {"train": 500}}),
    ({"by": "mixture", "share": 0.5, "public": 0.2}, {}),
    ({**DIRICHLET, "held_out": "uniform", "where": "answer != 'no'"}, {}),
    ({"source": {"day": "day.txt", "night": "night.txt"}, "by": "label", "piece": 40}, {}),
    (EVEN, {}),
    ({"by": "label"}, ASKED),
    (EVEN, ASKED),
    (DIRICHLET, {"instructions": {**ASKED["instructions"], "choices": [*ANSWERS]}}),
    (DIRICHLET, {"instructions": {"template": "chat", "choices": [*ANSWERS]}}),
    (DIRICHLET, TALKS),
    (DIRICHLET, {"preferences": True}),
]


@pytest.mark.parametrize(("divide", "data"), DIVISIONS)
def test_clients_have_the_same_tokens(coterie_command, news, bases, tmp_path, divide, data) -> None:
    if data.get("instructions", {}).get("template") == "chat":
        lines = (news / "news.jsonl").read_text().replace("question", "instruction")
        (news / "news.jsonl").write_text(lines.replace('"answer"', '"output"'))
    path = write_run(news, bases / "llama", divide, data=data)
    out = tmp_path / "divided"
    result = coterie_command("divide", path, "--out", out, "--seed", 3)
    assert result.code == 0, result.err
    assert "differs" not in result.out
    assert f"coterie run {out}/run.yaml" in result.out
    config, divided = load_config(path, ["seed=3"]), load_config(out / "run.yaml")
    own = ("data", "data_root", "divide", "clients")
    assert {**divided.as_dict(), **dict.fromkeys(own)} == config.as_dict() | dict.fromkeys(own)
    before, after = read(config), read(divided)
    assert [c.name for c in after.clients] == [c.name for c in before.clients]
    for first, second in zip(before.clients, after.clients, strict=True):
        assert second.digest() == first.digest()
        assert questions(second) == questions(first)
        assert second.data.test.counts() == first.data.test.counts()
    assert {path.name for path in out.iterdir() if path.is_dir()} == {c.name for c in after.clients}


def test_other_paths_of_the_run_file_stay_valid(coterie_command, news, bases, tmp_path) -> None:
    (news / "texts").mkdir()
    (news / "news.jsonl").rename(news / "texts" / "news.jsonl")
    (news / "texts" / "base").symlink_to(bases / "llama")
    path = write_run(news, Path("base"), {"by": "label"}, data_root="texts")
    assert coterie_command("divide", path, "--out", tmp_path / "files").code == 0
    written = yaml.safe_load((tmp_path / "files" / "run.yaml").read_text())
    assert written["data_root"] == "../texts"
    assert written["clients"][0]["test"] == "../files/l-0/test.jsonl"
    assert len(read(load_config(tmp_path / "files" / "run.yaml")).clients) == 3


DIFFERENCES = [
    ({"method": "centralized"}, "centralized does not train on a public set that is a file."),
    ({"server": {}, "method": "fedmkt"}, "The server's validation text is its test text."),
    ({"data": {"instructions": TITLED}}, "client-2's own"),
]


@pytest.mark.parametrize(("changes", "sentence"), DIFFERENCES)
def test_differences_are_printed(succeeds, news, bases, tmp_path, changes, sentence) -> None:
    if "data" in changes:  # too many answers for choices, but few enough in a client's records
        lines = (news / "news.jsonl").read_text().splitlines()[:40]
        (news / "news.jsonl").write_text("\n".join(lines))
    path = write_run(news, bases / "llama", EVEN, **changes)
    out = succeeds("divide", path, "--out", tmp_path / "files", width=200)
    assert "differs from the run that divides" in out
    assert sentence in out


REFUSED = [
    (None, {}, "has no section `divide`"),
    ({"by": "label", "source": "no.jsonl"}, {}, "no.jsonl is neither a file or folder"),
    (DIRICHLET, {"data": {"fractions": {"test": 0.001}}}, "client-1 receives no test text"),
    ({"by": "label", "source": "dates.parquet"}, {"data": DATED}, "cannot be written as JSON"),
]


@pytest.mark.parametrize(("divide", "changes", "sentence"), REFUSED)
def test_what_is_refused(refuses, news, bases, tmp_path, divide, changes, sentence) -> None:
    texts = {"label": ["a", "b"] * 20, "text": ["x"] * 40, "output": ["y"] * 40}
    columns: dict[str, list[Any]] = {**texts, "when": [datetime.date(1851, 10, 18)] * 40}
    pyarrow.parquet.write_table(pyarrow.table(columns), news / "dates.parquet")
    path = write_run(news, bases / "llama", divide or {}, **changes)
    if divide is None:
        path.write_text("clients: [{name: anna, path: day.txt}]")
    refuses(sentence, "divide", path, "--out", tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_an_existing_folder_is_left_alone(refuses, news, bases, tmp_path) -> None:
    path = write_run(news, bases / "llama", {"by": "label"})
    (tmp_path / "files").mkdir()
    sentence = "already exists; choose another folder with --out."
    refuses(sentence, "divide", path, "--out", tmp_path / "files")
    assert [*(tmp_path / "files").iterdir()] == []

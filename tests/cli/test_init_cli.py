"""`coterie init` writes a run file that runs as it is, and refuses folders that it cannot read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.analysis.fit import CONTEXT, SPARE
from coterie.analysis.need import need_of
from coterie.config.keys import keys
from coterie.config.read import load_config
from coterie.config.run import parse
from coterie.config.sections import RunFile

TEXT = "The ship lay at anchor.\n" * 40
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": TEXT},
    "messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi"}]},
    "instructions": {"instruction": "Name a ship.", "input": "", "output": "Pequod"},
    "preferences": {"prompt": "Name a ship.", "chosen": "Pequod", "rejected": "Titanic"},
}


ANNA = {"anna": {"path": "anna.jsonl"}}


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files to a folder; a text of the form `=KIND` is a record of this kind of data."""
    folder.mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(RECORDS[text[1:]]) if text.startswith("=") else text)


FOLDERS = [
    (
        {"anna.txt": TEXT, "Ben B.txt": TEXT, "cleo/2024/a.txt": TEXT, ".hidden": ""},
        {"anna": {"path": "anna.txt"}, "ben-b": {"path": "Ben B.txt"}, "cleo": {"path": "cleo"}},
        {},
    ),
    (
        {"anna/train.txt": TEXT, "anna/test/a.txt": TEXT, "ben/train.txt": "", "ben/x.txt": ""},
        {"anna": {"train": "anna/train.txt", "test": "anna/test"}, "ben": {"path": "ben"}},
        {},
    ),
    ({"yes.jsonl": "=text"}, {"yes": {"path": "yes.jsonl"}}, {}),
    ({"anna.jsonl": "=messages"}, ANNA, {"messages": True}),
    ({"anna.jsonl": "=conversations"}, ANNA, {"messages": True}),
    ({"anna.jsonl": "=preferences"}, ANNA, {"preferences": True}),
    ({"anna.jsonl": "=instructions"}, ANNA, {"instructions": {}}),
]


@pytest.mark.parametrize(("files", "clients", "data"), FOLDERS)
@pytest.mark.parametrize("options", [[], ["--all"]])
def test_a_run_is_written(coterie_command, tmp_path, files, clients, data, options) -> None:
    write(tmp_path / "texts", files)
    out = tmp_path / "run files" / "us.yaml"
    out.parent.mkdir()
    result = coterie_command("init", tmp_path / "texts", "--out", out, *options)
    assert result.code == 0, result.err
    assert f"{len(clients)} client" in result.out
    listed = [
        {"name": name} | {key: f"../texts/{path}" for key, path in paths.items()}
        for name, paths in clients.items()
    ]
    plain = {"name": "texts", "clients": listed, "data": data, "data_root": str(out.parent)}
    assert load_config(out).as_dict() == parse(plain).as_dict()


@pytest.fixture
def one_text(tmp_path, monkeypatch) -> None:
    """The current folder, with a folder of the texts of one client."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "texts", {"anna.txt": TEXT})


def test_all_writes_every_key_with_its_default(coterie_command, one_text) -> None:
    assert coterie_command("init", "texts", "--all").code == 0
    text = Path("coterie.yaml").read_text(encoding="utf-8")
    named = re.findall(r"^[ #]*(\w+): ?", text, re.MULTILINE)
    assert {key.split(".")[-1].removesuffix("[]") for key, _, _ in keys(RunFile)} <= {*named}
    before = load_config(Path("coterie.yaml")).as_dict()
    every = re.sub(r"^( *)#(?=\w+:)", r"\1", text, flags=re.MULTILINE)
    assert every.count("\n#") < text.count("\n#")
    Path("coterie.yaml").write_text(every, encoding="utf-8")
    assert load_config(Path("coterie.yaml")).as_dict() == before


def test_comments_are_the_docstrings_of_the_settings(coterie_command, one_text) -> None:
    assert coterie_command("init", "texts").code == 0
    text = Path("coterie.yaml").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(re.sub(r"^ *# ?", "", text, flags=re.MULTILINE).split())
    rows = {key: (default, meaning) for key, default, meaning in keys(RunFile)}
    for key in ("method", "rounds", "training.steps", "data.window"):
        default, meaning = rows[key]
        assert f"{meaning[1:]}; default: {default}." in words


@pytest.mark.parametrize("size", [CONTEXT + 20 * 10**6, CONTEXT + 10**9])
def test_a_base_has_settings_that_fit(coterie_command, bases, texts, tmp_path, monkeypatch, size):
    monkeypatch.setattr("coterie.bases.devices.memory_of", lambda kind: size)
    monkeypatch.chdir(bases)
    out = tmp_path / "us.yaml"
    result = coterie_command("init", texts, "--base", "llama", "--out", out)
    assert result.code == 0, result.err
    written, config = yaml.safe_load(out.read_text(encoding="utf-8")), load_config(out)
    assert written["data"]["window"] == 64  # the base's context
    assert ("micro_batch" in written["training"]) == (size < CONTEXT + 10**9)
    need = need_of(config, "poet")
    assert need is not None
    assert need.memory <= (size - CONTEXT) * (1 - SPARE)


def test_a_base_that_does_not_fit_is_refused(refuses, bases, texts, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.bases.devices.memory_of", lambda kind: CONTEXT + 1000)
    words = (texts, "--base", bases / "llama", "--out", tmp_path / "us.yaml")
    refuses("Nothing fits 1.1 GB", "init", *words)
    assert not (tmp_path / "us.yaml").exists()


REFUSED_FOLDERS = [
    (None, "There is no folder texts; name a folder"),
    ({}, "the folder texts contains no .txt, .jsonl or .parquet file"),
    ({".hidden.txt": TEXT}, "the folder texts contains no"),
    ({"anna.txt": TEXT, "ben/.keep": ""}, "the folder texts/ben contains no"),
    ({"anna.txt": TEXT, "us.yaml": "rounds: 2"}, "contains the run file us.yaml; run it with"),
    ({"anna.txt": TEXT, "ben/a.pdf": "", "b.md": ""}, "unknown kinds (1 .md, 1 .pdf); convert"),
    ({"train.txt": TEXT, "test.txt": TEXT}, "texts/test.txt is one split of a text"),
    ({"anna.txt": TEXT, "Anna/a.txt": TEXT}, "both give the client name anna; rename"),
    ({"anna.txt": TEXT, "ben.jsonl": "=messages"}, "contains plain text and texts/ben.jsonl"),
    ({"anna.jsonl": '{"title": "a"}'}, "line 1 of texts/anna.jsonl has the fields"),
    ({"anna.jsonl": "{"}, "is not valid JSON"),
]


@pytest.mark.parametrize(("files", "sentence"), REFUSED_FOLDERS)
def test_folders_that_are_refused(refuses, tmp_path, monkeypatch, files, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    if files is not None:
        write(tmp_path / "texts", files)
    refuses(sentence, "init", "texts")
    assert not Path("coterie.yaml").exists()


def test_an_existing_file_is_not_overwritten(refuses, one_text) -> None:
    Path("coterie.yaml").write_text("mine")
    refuses("coterie.yaml already exists; choose another file with --out.", "init", "texts")
    assert Path("coterie.yaml").read_text() == "mine"

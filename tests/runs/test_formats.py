"""A folder of another format is refused wherever a run is read, in a sentence that helps."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie import CoterieError
from coterie.cli import main
from coterie.messages import State
from coterie.messages.formats import FORMAT, VERSION, FormatError
from coterie.report.page import write_report
from coterie.runs import RunFolder
from tests.written_runs import DESCRIPTION

OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "the first": ({"format": 1, "coterie": "0.1.0"}, "1", "0.1.0"),
    "the first, which had no number": ({"coterie": "0.1.0"}, "1", "0.1.0"),
    "the next": ({"format": FORMAT + 1, "coterie": "9.8.7"}, str(FORMAT + 1), "9.8.7"),
    "nobody's": ({"format": 1}, "1", "another version"),
}
"""The fields of a run.json, and the format and the version that the error names."""


@pytest.fixture(scope="module")
def done(config, tmp_path_factory) -> Path:
    run = config(method="fedavg", rounds=1)
    return coterie.run(run, out=tmp_path_factory.mktemp("formats") / "run").path


def copied(run: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy a run, change its description, and return the description's file."""
    shutil.copytree(run, path)
    described = json.loads((path / "run.json").read_text(encoding="utf-8"))
    change(described)
    (path / "run.json").write_text(json.dumps(described), encoding="utf-8")
    return path / "run.json"


@pytest.fixture(params=OTHERS)
def other(request, done, tmp_path) -> tuple[Path, str]:
    """A folder of another format, and the sentence about it."""
    fields, number, wrote = OTHERS[request.param]
    path = tmp_path / "run"

    def change(described: dict[str, Any]) -> None:
        del described["format"], described["coterie"]
        described.update(fields)

    copied(done, path, change)
    return path, (
        f"The run in {path} has format {number} (written by Coterie {wrote}), but Coterie "
        f"{VERSION} reads format {FORMAT}. Use the version that wrote it, or start a "
        "new run in another folder."
    )


def content(path: Path) -> dict[str, bytes]:
    files = (p for p in path.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def test_a_run_is_stamped_with_format_and_version(done, tmp_path) -> None:
    described = json.loads((done / "run.json").read_text(encoding="utf-8"))
    assert (described["format"], described["coterie"]) == (FORMAT, VERSION)
    assert RunFolder(done).description == described
    folder = RunFolder.create(tmp_path / "own", DESCRIPTION)
    assert folder.description == {"format": FORMAT, "coterie": VERSION} | DESCRIPTION


def test_another_format_is_refused_by_the_library(other) -> None:
    path, sentence = other
    before = content(path)
    reads: list[Callable[[], object]] = [
        lambda: coterie.resume(path),
        lambda: coterie.load(path, "poet"),
        lambda: RunFolder(path).description,
    ]
    for read in reads:
        with pytest.raises(FormatError) as error:
            read()
        assert str(error.value) == sentence
    assert content(path) == before


@pytest.mark.parametrize("command", [["report"], ["run", "--resume"]])
def test_another_format_is_refused_by_commands(command, other, monkeypatch, capsys) -> None:
    path, sentence = other
    before = content(path)
    for place in (path, path.parent) if command == ["report"] else (path,):
        monkeypatch.setattr(sys, "argv", ["coterie", *command, str(place)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        assert "".join(capsys.readouterr().err.split()) == "".join(f"Error: {sentence}".split())
    assert content(path) == before


UNKNOWN: dict[str, Callable[[dict[str, Any]], None]] = {
    "colour": lambda config: config.update(colour=1),
    "training.stepz": lambda config: config["training"].update(stepz=1),
    "method.colour": lambda config: config["method"].update(colour=1),
    "base.colour": lambda config: config.update(base={"name": "tiny-gpt2", "colour": 1}),
    "data.window": lambda config: config["data"].update(window="wide"),
    "There is no method 'fedavg2'": lambda config: config["method"].update(name="fedavg2"),
    "nobodys": lambda config: config["aggregation"].update(transforms=[{"name": "nobodys"}]),
}
"""Changes to a configuration, by what an error message names."""


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_configuration_is_refused_with_file_and_version(key, done, tmp_path) -> None:
    def change(described: dict[str, Any]) -> None:
        described["coterie"] = "9.8.7"
        UNKNOWN[key](described["config"])

    file = copied(done, tmp_path / "run", change)
    readers: list[Any] = [coterie.resume, lambda run: coterie.load(run, "poet")]
    if not key.startswith(("method", "There", "nobodys")):  # a tokenizer needs no method
        readers.append(coterie.tokenizer)
    if key.startswith("base"):
        readers.append(lambda run: write_report([run], tmp_path / "report"))
    for read in readers:
        words = rf"configuration in {file}, .* 9\.8\.7 wrote: "
        with pytest.raises(CoterieError, match=words) as error:
            read(tmp_path / "run")
        assert key in str(error.value)
        assert str(error.value).endswith("or start a new run in another folder.")


def test_a_report_needs_only_the_names_of_settings(done, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.report.style.Picture.render", lambda *_: b"")  # drawing is slow

    def change(described: dict[str, Any]) -> None:
        for key in UNKNOWN.keys() - {"base.colour"}:
            UNKNOWN[key](described["config"])

    copied(done, tmp_path / "run", change)
    write_report([tmp_path / "run"], tmp_path / "report")


def test_a_run_of_another_format_is_there_and_not_overwritten_unless_forced(other, config) -> None:
    path, _ = other
    folder, before = RunFolder(path), content(path)
    assert folder.is_run
    with pytest.raises(CoterieError, match=r"already contains a run.*--out.*--force") as error:
        RunFolder.create(path, DESCRIPTION)
    assert not isinstance(error.value, FormatError)
    with pytest.raises(CoterieError, match="already contains a run"):
        coterie.run(config(method="fedavg", rounds=1), out=path)
    assert content(path) == before
    assert RunFolder.create(path, DESCRIPTION, force=True).description["format"] == FORMAT
    assert content(path).keys() == {"run.json"}


def test_a_state_of_another_format_is_refused(done, tmp_path, monkeypatch) -> None:
    shutil.copytree(done, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    path = folder.checkpoint(1) / "server.safetensors"
    number = f'\\"format\\": {FORMAT}'.encode()
    assert path.read_bytes().count(number) == 1
    data = path.read_bytes().replace(number, number[:-1] + b"7")
    monkeypatch.setattr(RunFolder, "read", lambda *_: data)
    with pytest.raises(FormatError, match=r"A state has format 7 .* Use the version that"):
        folder.load("server")
    monkeypatch.undo()
    assert isinstance(folder.load("client-poet"), State)

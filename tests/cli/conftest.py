"""Commands in the tests' own process, and finished runs for them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Command, Refuses, Said
from rich.console import Console

import coterie.cli
from coterie.cli import terminal


@pytest.fixture
def coterie_command(monkeypatch, capsys) -> Command:
    """Run `coterie ...` in this process, by default 80 columns wide, and return what it said."""

    def command(*arguments: object, width: int = 80) -> Said:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        monkeypatch.setattr(terminal, "console", Console(width=width))
        monkeypatch.setattr(terminal, "errors", Console(width=width, stderr=True))
        capsys.readouterr()
        code: object = 0
        try:
            coterie.cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return Said(code, out, err)

    return command


@pytest.fixture
def refuses(coterie_command) -> Refuses:
    """Check that `coterie ...` prints nothing but an error of one line with a sentence."""

    def check(sentence: str, *arguments: object) -> str:
        result = coterie_command(*arguments, width=400)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result
        assert result.err.startswith("Error: ")
        assert sentence in result.err
        return result.err

    return check


@pytest.fixture
def succeeds(coterie_command) -> Callable[..., str]:
    """Check that `coterie ...` succeeds, and return its output."""

    def check(*arguments: object, width: int = 80) -> str:
        result = coterie_command(*arguments, width=width)
        assert result.code == 0, result.err
        return result.out

    return check


@pytest.fixture(scope="session")
def finished(values, tmp_path_factory) -> Path:
    """A finished run with two baselines, whose adapters differ after a few steps at a high rate."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.02}
    changes = {"training": training, "evaluation": {"keep": "last"}}
    coterie.run(values(rounds=2, baselines=["pretrained", "local"], **changes), out=folder)
    return folder


@pytest.fixture(scope="session")
def chats(values, tmp_path_factory) -> dict[str, Any]:
    """A run on the conversations of two clients, as plain data, with four baselines."""
    folder = tmp_path_factory.mktemp("chats")
    for name, answer in (("anna", "sea"), ("ben", "I do not know it")):
        turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": answer}]
        (folder / f"{name}.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 12, "utf-8")
    return values(
        rounds=1,
        baselines=["pretrained", "local", "fedavg", "centralized"],
        data={"window": 40, "messages": {}},
        data_root=str(folder),
        clients=[{"name": name, "path": f"{name}.jsonl"} for name in ("anna", "ben")],
        training={"steps": 4, "batch": 2, "precision": "fp32", "learning_rate": 0.05},
        evaluation={"keep": "last", "generate": 6, "metric": "perplexity"},
    )


@pytest.fixture(scope="session")
def chatted(chats, tmp_path_factory) -> Path:
    """The folder of this run, when it is finished."""
    return coterie.run(chats, out=tmp_path_factory.mktemp("chatted") / "run").path


@pytest.fixture(scope="session")
def instructed(values, tmp_path_factory) -> Path:
    """The folder of a finished run on instructions."""
    folder = tmp_path_factory.mktemp("instructed")
    rows = [{"who": f"writer {n}", "what": "rain", "output": "yes"} for n in range(40)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "anna.jsonl").write_text(text, encoding="utf-8")
    data = {"window": 32, "instructions": {"template": "Does {{ who }} like {{ what }}?"}}
    changes = {"data": data, "clients": [{"name": "anna", "path": "anna.jsonl"}]}
    run = values(rounds=1, method="local", data_root=str(folder), **changes)
    return coterie.run(run, out=folder / "run").path

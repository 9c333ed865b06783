"""Duplicates are told when a run begins: of all clients on one machine, of one's own elsewhere."""

import json
from typing import Any

import pytest

import coterie
from coterie.deployment.client import Worker
from coterie.runs import Callback
from coterie.testing.loop import Loop, server, site

SHARED = "validation or test texts duplicated in another client's training text"
OWN = "validation or test texts duplicated in the same client's training text"


@pytest.fixture
def run(config, texts, tmp_path) -> coterie.RunConfig:
    """One client tests on its own training text, another on the first one's."""
    for name in ("poet", "whaler"):
        book = (texts / f"{name}.txt").read_text(encoding="utf-8")
        lines = [book[start : start + 300] for start in range(0, 12_000, 300)]
        text = [{"text": line} for line in lines]
        own = [{"text": f"Here {name} goes on alone. {line[::-1]}"} for line in lines]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, text)))
        (tmp_path / f"{name}-own.jsonl").write_text("\n".join(map(json.dumps, own)))
    clients = [
        {"name": n, "train": f"{n}.jsonl", "test": "poet.jsonl", "validation": f"{n}-own.jsonl"}
        for n in ("poet", "whaler")
    ]
    data = {"window": 16, "limits": {"train": 1500, "validation": 400, "test": 1000}}
    return config(clients=clients, data_root=str(tmp_path), method="local", rounds=1, data=data)


class Told(Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_warning(self, text: str) -> None:
        self.lines.append(text)


def kinds(lines: list[str]) -> set[str]:
    assert all(line.endswith("; run `coterie data FILE` for details") for line in lines)
    return {line.split(": ")[1] for line in lines}


def test_a_run_that_begins_tells_of_all_clients(run, tmp_path) -> None:
    reports, compared = Told(), []
    coterie.run(run, out=tmp_path / "run", callbacks=[reports])
    assert {OWN, SHARED} <= kinds(reports.lines)
    coterie.compare(run, ["local"], out=tmp_path / "compare", report=compared.append)
    assert compared == [*reports.lines, "Run 1 of 1: local-seed0"]


def test_a_client_warns_of_its_own_texts_and_sends_nothing(run, tmp_path) -> None:
    warnings: dict[str, list[str]] = {"poet": [], "whaler": []}

    def worker(name: str) -> Worker:
        def seen(kind: str, value: Any) -> None:
            if kind == "warning":
                warnings[name].append(value)

        return Worker(site(run, name, tmp_path), seen)

    loop = Loop({name: worker(name) for name in warnings})
    server(run, tmp_path / "server", loop).rounds()
    assert OWN in kinds(warnings["poet"])
    assert OWN not in kinds(warnings["whaler"])  # it cannot know the poet's text
    assert SHARED not in kinds(warnings["poet"] + warnings["whaler"])
    assert not any(b"coterie data" in message for message in loop.seen)

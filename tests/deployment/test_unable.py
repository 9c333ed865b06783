"""A client whose machine lacks what a run needs: it leaves with the error, and is not asked
again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.deployment import server as engine
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.deployment.status import ServerWatch
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, server, site, workers

WHO = "poet"


def no_base(place: Site, folder: Path) -> Site:
    """Give a base that is not there."""
    return replace(place, base=str(folder / "nowhere"))


def half_a_base(place: Site, folder: Path) -> Site:
    """Give a base whose weights are cut off."""
    assert place.base is not None
    for path in Path(place.base).iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[: 500 if "model" in path.name else None])
    return replace(place, base=str(folder))


def another_architecture(place: Site, folder: Path) -> Site:
    """Give a base of an unknown kind."""
    (folder / "config.json").write_text(json.dumps({"model_type": "nosuch"}))
    return replace(place, base=str(folder))


def no_text(place: Site, folder: Path) -> Site:
    """Give a text that is not there."""
    return replace(place, texts={"path": str(folder / "nowhere.txt")})


def an_empty_folder(place: Site, folder: Path) -> Site:
    """Give a folder without a text."""
    return replace(place, texts={"path": str(folder)})


def an_empty_text(place: Site, folder: Path) -> Site:
    """Give a text with nothing in it."""
    (folder / "empty.txt").write_text("")
    return replace(place, texts={"path": str(folder / "empty.txt")})


def no_utf8(place: Site, folder: Path) -> Site:
    """Give a text in another encoding."""
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 500)
    return replace(place, texts={"path": str(folder / "latin.txt")})


def short_text(place: Site, folder: Path) -> Site:
    """Give less than a window of text."""
    (folder / "short.txt").write_text("Sea.")
    return replace(place, texts={"path": str(folder / "short.txt")})


def broken_records(place: Site, folder: Path) -> Site:
    """Give records that are no JSON."""
    (folder / "records.jsonl").write_text('{"text": ')
    return replace(place, texts={"path": str(folder / "records.jsonl")})


UNABLE = [no_base, half_a_base, another_architecture, no_text, an_empty_folder, an_empty_text]
UNABLE += [no_utf8, short_text, broken_records]


class Notes(ServerWatch):
    """Keeps what a person would be told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    monkeypatch.setattr(engine, "GRACE", 0.0)


@pytest.mark.parametrize("spoil", UNABLE, ids=lambda spoil: spoil.__name__)
def test_it_leaves_with_the_error_and_the_run_goes_on(
    spoil: Callable[[Site, Path], Site], config, tmp_path
) -> None:
    run = config(method="fedavg", rounds=2, deployment={"quorum": 2, "deadline": 60})
    (tmp_path / "own").mkdir()
    everybody = workers(run, tmp_path)
    place = spoil(site(run, WHO, tmp_path), tmp_path / "own")
    everybody[WHO] = worker = Worker(place)
    notes, network = Notes(), Loop(everybody)
    server(run, tmp_path / "server", network, notes).rounds()
    assert worker.finished
    assert worker.error.endswith(".")
    assert "\n" not in worker.error
    assert [order.kind for name, order in network.orders if name == WHO] == ["join"]
    assert f"{WHO} could not join: {FAULT_MESSAGES['unable']}" in notes.lines
    result = RunFolder(tmp_path / "server").result
    assert result is not None
    assert all(everybody[name].finished and not everybody[name].error for name in run_names(run))


def run_names(run) -> list[str]:
    return [client.name for client in run.clients if client.name != WHO]


def test_it_is_asked_again_when_it_comes_back(config, tmp_path) -> None:
    run = config(method="fedavg", rounds=1)
    (tmp_path / "own").mkdir()
    everybody = workers(run, tmp_path)
    everybody[WHO] = Worker(no_base(site(run, WHO, tmp_path), tmp_path / "own"))

    def back(loop: Loop) -> None:
        loop.reconnect(WHO, Worker(site(run, WHO, tmp_path)))

    network = Loop(everybody, events={20: back})
    server(run, tmp_path / "server", network).rounds()
    assert [order.kind for name, order in network.orders if name == WHO] == [
        *("join", "join", "step", "finish")
    ]


def test_a_full_disk_is_tried_again(config, tmp_path, monkeypatch) -> None:
    run = config(method="fedavg", rounds=1)
    (tmp_path / "sites").mkdir()
    everybody = workers(run, tmp_path)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    everybody[WHO] = Worker(replace(site(run, WHO, tmp_path), out=blocked / "runs"))
    network = Loop(everybody, events={20: lambda _: blocked.unlink()})
    server(run, tmp_path / "server", network).rounds()
    assert everybody[WHO].finished
    assert not everybody[WHO].error

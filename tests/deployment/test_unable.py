"""A client whose machine lacks what a run needs: it leaves with the error, and is not asked
again."""

from dataclasses import replace
from pathlib import Path

import pytest
from looped import Notes, result_of

from coterie.deployment import server as engine
from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.messages.envelope import FAULT_MESSAGES
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, server, site, workers

WHO = "poet"


UNABLE: dict[str, tuple[str, str, str | bytes | None]] = {
    "no_base": ("base", "nowhere", None),
    "half_a_base": ("base", "", None),
    "another_architecture": ("base", "config.json", '{"model_type": "nosuch"}'),
    "no_text": ("texts", "nowhere.txt", None),
    "an_empty_folder": ("texts", "", None),
    "an_empty_text": ("texts", "empty.txt", ""),
    "no_utf8": ("texts", "latin.txt", b"caf\xe9 " * 500),
    "short_text": ("texts", "short.txt", "Sea."),
    "broken_records": ("texts", "records.jsonl", '{"text": '),
}
"""Whether a base or a text is missing; the name of a file, and the file's content, if any."""


def unable(case: str, place: Site, folder: Path) -> Site:
    """Return a client's settings with a base or a text that it cannot use."""
    kind, name, content = UNABLE[case]
    folder.mkdir()
    if case == "half_a_base":
        assert place.base is not None
        for path in Path(place.base).iterdir():
            data = path.read_bytes()[: 500 if "model" in path.name else None]
            (folder / path.name).write_bytes(data)
    if content is not None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if kind == "base":
        return replace(place, base=str(folder / name if name == "nowhere" else folder))
    return replace(place, texts={"path": str(folder / name)})


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    monkeypatch.setattr(engine, "GRACE", 0.0)


@pytest.mark.parametrize("case", UNABLE)
def test_it_leaves_with_the_error_and_the_run_goes_on(case, config, tmp_path) -> None:
    run = config(method="fedavg", rounds=2, deployment={"quorum": 2, "deadline": 60})
    everybody = workers(run, tmp_path)
    everybody[WHO] = worker = Worker(unable(case, site(run, WHO, tmp_path), tmp_path / "own"))
    notes, network = Notes(), Loop(everybody)
    server(run, tmp_path / "server", network, notes).rounds()
    assert worker.finished
    assert worker.error.endswith(".")
    assert "\n" not in worker.error
    assert [order.kind for name, order in network.orders if name == WHO] == ["join"]
    assert f"{WHO} could not join: {FAULT_MESSAGES['unable']}" in notes.lines
    assert result_of(RunFolder(tmp_path / "server"))
    assert all(each.finished and not each.error for each in everybody.values() if each != worker)


def test_it_is_asked_again_when_it_comes_back(config, tmp_path) -> None:
    run = config(method="fedavg", rounds=1)
    everybody = workers(run, tmp_path)
    everybody[WHO] = Worker(unable("no_base", site(run, WHO, tmp_path), tmp_path / "own"))

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

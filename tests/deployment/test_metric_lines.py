"""Entries of a run: each is there once, whatever was killed, lost, late or false."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from crashes.state import every, is_state
from crashes.ways import Way, after, before, half_lines
from every_method import some
from looped import NAMES, Killed, Spoilt, kill, narrow, result_of, steps

import coterie
from coterie.deployment import server as engine
from coterie.engines.client_host import ClientHost
from coterie.errors import CoterieError
from coterie.messages.envelope import Reply, unseal
from coterie.messages.names import CHANGE
from coterie.runs import RunFolder
from coterie.runs import folder as run_folder
from coterie.testing.loop import Loop, assert_as_local, deploy, folder, server, workers

POINTS: dict[str, tuple[Any, str, Way, Callable[..., bool]]] = {
    "before append": (RunFolder, "append", before, every),
    "in append": (RunFolder, "append", half_lines, every),
    "after append": (RunFolder, "append", after, every),
    "in save": (run_folder, "write_bytes", after, is_state),
    "after save": (RunFolder, "save", after, every),
    "in finish": (RunFolder, "finish", before, every),
}
"""The function around which a run is killed, how, and the predicate of the calls that count."""
Line = dict[str, Any]


def lines(folder: RunFolder) -> list[Line]:
    """Return all entries in order, with times replaced by a constant."""
    return [m | {"value": 0} if m["name"] == "seconds" else m for m in folder.metrics()]


def learnt(folder: RunFolder, clients: Iterable[str] = NAMES) -> list[Line]:
    """Return what clients measured, without traffic, times and the server's view of uploads."""
    measured = [m for m in folder.metrics() if m["client"] in clients]
    others = ("bytes/", CHANGE)
    return sorted((m for m in measured if not m["name"].startswith(others)), key=json.dumps)


def kill_every_round_once(point: str, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Interrupt a run once in every round, at the first call of a function."""
    owner, name, way, of = POINTS[point]
    killed: set[int] = set()

    def hit(*args: Any) -> bool:
        if not of(*args) or (turns := RunFolder(out).turns()) in killed:
            return False
        killed.add(turns)
        return True

    patch.setattr(owner, name, way(getattr(owner, name), hit, kill))


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> Callable[[str], RunFolder]:
    """The run of a method in this process that nothing happened to."""
    made: dict[str, RunFolder] = {}

    def run(method: str) -> RunFolder:
        if method not in made:
            out = tmp_path_factory.mktemp(method) / "run"
            run = config(method=method, evaluation={"every": 1})
            made[method] = RunFolder(coterie.run(run, out=out).path)
        return made[method]

    return run


@pytest.mark.parametrize(
    "point", [pytest.param(p, marks=[] if p == "in save" else pytest.mark.slow) for p in POINTS]
)
@pytest.mark.parametrize("method", ["fedavg", pytest.param("local", marks=pytest.mark.thorough)])
def test_a_kill_keeps_each_line(method, point, config, undisturbed, tmp_path, monkeypatch) -> None:
    expected = undisturbed(method)
    out, kills = tmp_path / "run", 0
    kill_every_round_once(point, out, monkeypatch)
    with pytest.raises(Killed):
        coterie.run(config(method=method, evaluation={"every": 1}), out=out)
    while RunFolder(out).result is None:
        kills += 1
        try:
            coterie.resume(out)
        except Killed:
            continue
    assert kills == (1 if point == "in finish" else 3)
    assert lines(RunFolder(out)) == lines(expected)
    assert result_of(RunFolder(out)) | {"seconds": 0} == result_of(expected) | {"seconds": 0}


@pytest.mark.parametrize("method", some({"fedavg"}, ["fedavg", "local"]))
def test_every_score_is_there_once_and_says_when_it_came_up(method, undisturbed) -> None:
    metrics = [m for m in undisturbed(method).metrics() if m["name"].startswith("test/")]
    scored = [(m["client"], m["name"], m["round"]) for m in metrics]
    points = ("test/trained", "test/aggregated")
    assert sorted(scored) == sorted((c, p, r) for c in NAMES for p in points for r in range(3))
    later = {(m["name"], m["round"], m["during"]) for m in metrics if "during" in m}
    during = {("test/aggregated", 0, 1), ("test/aggregated", 1, 2)}
    assert later == (during if method == "fedavg" else set())
    # What everybody got after a round is what is scored as its aggregate: one model for all.
    if method == "local":
        value = {(m["client"], m["name"], m["round"]): m["value"] for m in metrics}
        for (client, name, round), score in value.items():
            assert score == value[client, "test/trained", round], name


def shared(config: Any, method: str = "comigs-1g1s", **deployment: Any) -> coterie.RunConfig:
    """Return a deployed run whose server receives entries."""
    settings = {"quorum": 3, "deadline": 60, "share_metrics": True}
    return config(method=method, evaluation={"every": 1}, deployment=settings | deployment)


def without_the_end(lines: list[Line]) -> list[Line]:
    """Remove from entries whether they were made after the last round."""
    return [{k: v for k, v in m.items() if (k, v) != ("during", 3)} for m in lines]


@pytest.mark.parametrize("method", some({"fedavg"}, ["fedavg", "local"]))
def test_a_server_has_the_figures_of_one_process(method, config, undisturbed, tmp_path) -> None:
    deploy(shared(config, method), tmp_path)
    actual, expected = RunFolder(tmp_path / "server"), undisturbed(method)
    assert without_the_end(learnt(actual)) == learnt(expected)
    # The last download of "local" is empty; in a deployment, it is sent nevertheless.
    for key in ("trained", "aggregated", *(["traffic"] if method == "fedavg" else [])):
        assert result_of(actual)[key] == result_of(expected)[key]


def test_figures_of_a_bad_upload_do_not_count(config, undisturbed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    loop = deploy(shared(config, "fedavg"), tmp_path, change=Spoilt(narrow, 1))
    assert steps(loop)["poet", 1] == 2
    assert without_the_end(learnt(RunFolder(tmp_path / "server"))) == learnt(undisturbed("fedavg"))


def test_each_figure_survives_a_kill_at_the_end(config, undisturbed, tmp_path, monkeypatch) -> None:
    run, finish = shared(config, "fedavg"), RunFolder.finish

    def killed(self: RunFolder, result: Any) -> None:
        if self.path.name == "server":
            raise Killed
        finish(self, result)

    loop = Loop(workers(run, tmp_path))
    monkeypatch.setattr(RunFolder, "finish", killed)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", loop).rounds()
    monkeypatch.setattr(RunFolder, "finish", finish)
    monkeypatch.setattr(engine, "GRACE", 0.0)
    loop.away = {"poet"}  # it has ended
    server(run, tmp_path / "server", Loop(loop.workers, away={"poet"})).rounds()
    actual, expected = RunFolder(tmp_path / "server"), undisturbed("fedavg")
    assert without_the_end(learnt(actual)) == learnt(expected)
    for key in ("trained", "aggregated", "traffic"):
        assert result_of(actual)[key] == result_of(expected)[key]


def test_what_a_client_may_not_claim_in_a_figure(config, undisturbed, tmp_path) -> None:
    """Send figures of another round, of the run and of the server."""
    lies = [
        {"round": 2**20, "client": "poet", "name": "loss/late", "value": 1},
        {"round": 0, "client": "poet", "name": "loss/early", "value": 1},
        {"round": 0, "client": "poet", "name": "seconds", "value": 10**9},
        {"round": 0, "client": "poet", "name": "server/aggregated", "value": "best"},
        {"round": 0, "client": "poet", "name": "bytes/up", "value": 10**9},
        {"round": 0, "name": "server/aggregated", "value": "best"},
        {"round": 0, "client": "whaler", "name": "loss/other", "value": 1},
    ]

    def lying(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        if name != "poet" or reply.kind == "join":
            return data
        header = reply.model_dump(exclude_none=True)
        header["entries"] += lies
        text = json.dumps(header).encode()
        return len(text).to_bytes(4, "big") + text + body

    deploy(shared(config, "fedavg"), tmp_path, change=lying)
    metrics = list(RunFolder(tmp_path / "server").metrics())
    rounds = {
        name: [m["round"] for m in metrics if m["name"] == name and m["client"] == "poet"]
        for name in ("loss/late", "loss/early", "loss/other")
    }
    # The last is of the end, after the last round.
    assert rounds["loss/late"] == [0, 1, 2, 2]
    assert rounds["loss/early"] == rounds["loss/other"] == [0, 0, 1, 2]
    assert 10**9 not in [m["value"] for m in metrics]
    clients = [m for m in metrics if m["name"] not in rounds and m["client"] in NAMES]
    measured = [m for m in clients if not m["name"].startswith(("bytes/", CHANGE))]
    assert sorted(without_the_end(measured), key=json.dumps) == learnt(undisturbed("fedavg"))
    assert "server" not in result_of(RunFolder(tmp_path / "server"))


def scored(run: coterie.RunConfig, out: Path, name: str) -> dict[tuple[str, int], Any]:
    """Return a client's scores by point and round, and check that each exists once."""
    metrics = [m for m in folder(run, out, name).metrics() if m["name"].startswith("test/")]
    scores = {(m["name"].removeprefix("test/"), m["round"]): m["value"] for m in metrics}
    assert len(scores) == len(metrics)
    return scores


def test_a_client_that_missed_a_round_has_no_score_of_it(config, tmp_path) -> None:
    run = shared(config, "fedavg", quorum=2, deadline=0.001)
    deploy(run, tmp_path, lose=lambda name, order: (name, order.turn) == ("poet", 1))
    everything = {(p, r) for p in ("trained", "aggregated") for r in range(3)}
    assert scored(run, tmp_path, "whaler").keys() == everything
    # That of round 0 came up in the step that was undone.
    assert scored(run, tmp_path, "poet").keys() == {
        ("trained", 0),
        ("trained", 2),
        ("aggregated", 2),
    }


@pytest.mark.parametrize("method", some({"fedavg"}, ["fedavg", "local"]))
def test_who_missed_the_last_round_is_scored_at_the_end(method, config, tmp_path) -> None:
    run = shared(config, method, quorum=2, deadline=0.001)
    lost = {("poet", "step", 2)}
    deploy(run, tmp_path, lose=lambda name, order: (name, order.kind, order.turn) in lost)
    measured, others = (scored(run, tmp_path, name) for name in ("poet", "whaler"))
    assert {("trained", 2), ("aggregated", 2)} <= measured.keys()
    # The model of the last step that counted.
    assert measured["trained", 2] == measured["trained", 1]
    if method == "local":
        assert measured["aggregated", 2] == measured["trained", 2]
    result = result_of(folder(run, tmp_path, "poet"))
    assert result["aggregated"] == {"poet": measured["aggregated", 2]}
    assert result["trained"] == {"poet": measured["trained", 2]}
    combined = result_of(RunFolder(tmp_path / "server"))
    assert combined["aggregated"] == {
        "diarist": scored(run, tmp_path, "diarist")["aggregated", 2],
        "poet": measured["aggregated", 2],
        "whaler": others["aggregated", 2],
    }


@pytest.mark.parametrize("fault", some({"scores"}, ["scores", "disk"]))
def test_an_end_that_fails_at_first_is_undone(fault, config, tmp_path, monkeypatch) -> None:
    """Fail where the last download was applied already."""
    run = shared(config, "fedavg-ft")
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    failed: set[str] = set()
    score, save = ClientHost._score, RunFolder.save

    def fail(name: str) -> None:
        if name not in failed:
            failed.add(name)
            raise CoterieError("not now")

    def scoring(self: ClientHost, point: str, round: int) -> None:
        if fault == "scores" and (point, round) == ("aggregated", 2):
            fail(self.name)
        score(self, point, round)

    def saving(self: RunFolder, rounds: int, states: Any, **more: Any) -> None:
        if fault == "disk" and rounds == 4:
            fail(self.path.name)
        save(self, rounds, states, **more)

    monkeypatch.setattr(ClientHost, "_score", scoring)
    monkeypatch.setattr(RunFolder, "save", saving)
    deploy(run, tmp_path)
    assert len(failed) == 3
    assert_as_local(run, tmp_path, local)
    for name in NAMES:
        assert learnt(folder(run, tmp_path, name), [name]) == learnt(local, [name])

"""Entries of a run: each is there once, whatever was killed, lost, late or false."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from every_method import some

import coterie
from coterie.deployment import server as engine
from coterie.engines.client_host import ClientHost
from coterie.errors import CoterieError
from coterie.messages import Message, State
from coterie.messages.envelope import Reply, seal, unseal
from coterie.messages.names import CHANGE
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_as_local, deploy, folder, server, workers

NAMES = ("diarist", "poet", "whaler")
POINTS = ("before append", "in append", "after append", "in save", "after save", "in finish")
Line = dict[str, Any]


class Killed(BaseException):
    """The process ends."""


def lines(folder: RunFolder) -> list[Line]:
    """All entries in order; of a time only that it was taken."""
    return [m | {"value": 0} if m["name"] == "seconds" else m for m in folder.metrics()]


def learnt(folder: RunFolder, clients: Iterable[str] = NAMES) -> list[Line]:
    """What clients measured, without traffic, times and the server's view of uploads."""
    measured = [m for m in folder.metrics() if m["client"] in clients]
    others = ("bytes/", CHANGE)
    return sorted((m for m in measured if not m["name"].startswith(others)), key=json.dumps)


def kill_every_round_once(point: str, patch: pytest.MonkeyPatch) -> None:
    """From now on, every round is killed at a point, the first time that it comes there."""
    killed: set[int] = set()
    append, save, finish = RunFolder.append, RunFolder.save, RunFolder.finish

    def passes(here: str, round: int) -> bool:
        if here != point or round in killed:
            return True
        killed.add(round)
        return False

    def appended(self: RunFolder, entries: list[Line]) -> None:
        round = self.turns()
        if not passes("before append", round):
            raise Killed
        if not passes("in append", round):
            text = "".join(json.dumps(line) + "\n" for line in entries)
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(text[: 2 * len(text) // 3])
            raise Killed
        append(self, entries)
        if not passes("after append", round):
            raise Killed

    def cut_off(states: Iterable[tuple[str, State]]) -> Iterator[tuple[str, State]]:
        yield next(iter(states))
        raise Killed

    def saved(self: RunFolder, rounds: int, states: Any, **more: Any) -> None:
        save(self, rounds, states if passes("in save", rounds) else cut_off(states), **more)
        if not passes("after save", rounds):
            raise Killed

    def finished(self: RunFolder, result: Any) -> None:
        if not passes("in finish", self.turns()):
            raise Killed
        finish(self, result)

    for name, patched in (("append", appended), ("save", saved), ("finish", finished)):
        patch.setattr(RunFolder, name, patched)


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
def test_a_kill_around_the_end_of_a_round_neither_loses_nor_doubles_a_line(
    method, point, config, undisturbed, tmp_path, monkeypatch
) -> None:
    expected = undisturbed(method)
    kill_every_round_once(point, monkeypatch)
    out, kills = tmp_path / "run", 0
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
    result = RunFolder(out).result
    assert result is not None
    assert expected.result is not None
    assert result | {"seconds": 0} == expected.result | {"seconds": 0}


@pytest.mark.parametrize("method", some({"fedavg"}, ["fedavg", "local"]))
def test_every_score_is_there_once_and_says_when_it_came_up(method, undisturbed) -> None:
    found = [m for m in undisturbed(method).metrics() if m["name"].startswith("test/")]
    said = [(m["client"], m["name"], m["round"]) for m in found]
    points = ("test/trained", "test/aggregated")
    assert sorted(said) == sorted((c, p, r) for c in NAMES for p in points for r in range(3))
    later = {(m["name"], m["round"], m["during"]) for m in found if "during" in m}
    one = {("test/aggregated", 0, 1), ("test/aggregated", 1, 2)}
    assert later == (one if method == "fedavg" else set())
    # What everybody got after a round is what is scored as its aggregate: one model for all.
    if method == "local":
        value = {(m["client"], m["name"], m["round"]): m["value"] for m in found}
        for (client, name, round), score in value.items():
            assert score == value[client, "test/trained", round], name


def shared(config: Any, method: str = "comigs-1g1s", **deployment: Any) -> coterie.RunConfig:
    """A deployed run whose server learns entries."""
    settings = {"quorum": 3, "deadline": 60, "share_metrics": True}
    return config(method=method, evaluation={"every": 1}, deployment=settings | deployment)


def without_the_end(found: list[Line]) -> list[Line]:
    """Entries, whether or not they say that they came up after the last round."""
    return [{k: v for k, v in m.items() if (k, v) != ("during", 3)} for m in found]


def spoilt_once(run: int) -> Callable[[str, bytes], bytes]:
    """The poet's first upload of a round has a tensor of another shape."""
    spoilt: list[str] = []

    def change(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        if (name, reply.kind, reply.turn) != ("poet", "step", run) or spoilt:
            return data
        spoilt.append(name)
        message = Message.decode(body)
        first = min(message["adapter"])
        tensors = {**message["adapter"], first: message["adapter"][first][:1]}
        groups = {**message.groups, "adapter": tensors}
        return seal(reply, Message(message.exchange, groups, message.values).encode())

    return change


@pytest.mark.parametrize("method", some({"fedavg"}, ["fedavg", "local"]))
def test_a_server_that_is_told_figures_has_those_of_one_process(
    method, config, undisturbed, tmp_path
) -> None:
    run = shared(config, method)
    deploy(run, tmp_path)
    here, expected = RunFolder(tmp_path / "server"), undisturbed(method)
    assert without_the_end(learnt(here)) == learnt(expected)
    assert here.result is not None
    assert expected.result is not None
    for key in ("trained", "aggregated"):
        assert here.result[key] == expected.result[key]
    if method == "fedavg":  # the other's last download is empty: here it is sent nevertheless
        assert here.result["traffic"] == expected.result["traffic"]


def test_figures_of_an_upload_that_is_refused_do_not_count(
    config, undisturbed, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    loop = deploy(shared(config, "fedavg"), tmp_path, change=spoilt_once(1))
    assert sum((n, o.kind, o.turn) == ("poet", "step", 1) for n, o in loop.orders) == 2
    assert without_the_end(learnt(RunFolder(tmp_path / "server"))) == learnt(undisturbed("fedavg"))


def test_a_server_killed_before_its_result_has_every_figure_once(
    config, undisturbed, tmp_path, monkeypatch
) -> None:
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
    here, expected = RunFolder(tmp_path / "server"), undisturbed("fedavg").result
    assert without_the_end(learnt(here)) == learnt(undisturbed("fedavg"))
    assert here.result is not None
    assert expected is not None
    for key in ("trained", "aggregated", "traffic"):
        assert here.result[key] == expected[key]


def test_what_a_client_may_not_claim_in_a_figure(config, undisturbed, tmp_path) -> None:
    """Of another round; of the run; or of the server."""
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
    found = list(RunFolder(tmp_path / "server").metrics())
    rounds = {
        name: [m["round"] for m in found if m["name"] == name and m["client"] == "poet"]
        for name in ("loss/late", "loss/early", "loss/other")
    }
    # The last is of the end, after the last round.
    assert rounds["loss/late"] == [0, 1, 2, 2]
    assert rounds["loss/early"] == rounds["loss/other"] == [0, 0, 1, 2]
    assert 10**9 not in [m["value"] for m in found]
    told = [m for m in found if m["name"] not in rounds and m["client"] in NAMES]
    mine = [m for m in told if not m["name"].startswith(("bytes/", CHANGE))]
    assert sorted(without_the_end(mine), key=json.dumps) == learnt(undisturbed("fedavg"))
    result = RunFolder(tmp_path / "server").result
    assert result is not None
    assert "server" not in result


def scored(run: coterie.RunConfig, out: Path, name: str) -> dict[tuple[str, int], Any]:
    """A client's scores by point and round, each once."""
    found = [m for m in folder(run, out, name).metrics() if m["name"].startswith("test/")]
    scores = {(m["name"].removeprefix("test/"), m["round"]): m["value"] for m in found}
    assert len(scores) == len(found)
    return scores


def test_who_did_not_count_in_a_round_has_no_score_of_its_aggregate(config, tmp_path) -> None:
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
    mine, others = (scored(run, tmp_path, name) for name in ("poet", "whaler"))
    assert {("trained", 2), ("aggregated", 2)} <= mine.keys()
    assert mine["trained", 2] == mine["trained", 1]  # the model of the last step that counted
    if method == "local":
        assert mine["aggregated", 2] == mine["trained", 2]
    result = folder(run, tmp_path, "poet").result
    assert result is not None
    assert result["aggregated"] == {"poet": mine["aggregated", 2]}
    assert result["trained"] == {"poet": mine["trained", 2]}
    told = RunFolder(tmp_path / "server").result
    assert told is not None
    assert told["aggregated"] == {
        "diarist": scored(run, tmp_path, "diarist")["aggregated", 2],
        "poet": mine["aggregated", 2],
        "whaler": others["aggregated", 2],
    }


@pytest.mark.parametrize("what", some({"scores"}, ["scores", "disk"]))
def test_an_end_that_fails_at_first_is_as_if_it_had_not_begun(
    what, config, tmp_path, monkeypatch
) -> None:
    """Also where the state before it is the result, and the download was taken in already."""
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
        if what == "scores" and (point, round) == ("aggregated", 2):
            fail(self.name)
        score(self, point, round)

    def saving(self: RunFolder, rounds: int, states: Any, **more: Any) -> None:
        if what == "disk" and rounds == 4:
            fail(self.path.name)
        save(self, rounds, states, **more)

    monkeypatch.setattr(ClientHost, "_score", scoring)
    monkeypatch.setattr(RunFolder, "save", saving)
    deploy(run, tmp_path)
    assert len(failed) == 3
    assert_as_local(run, tmp_path, local)
    for name in NAMES:
        assert learnt(folder(run, tmp_path, name), [name]) == learnt(local, [name])

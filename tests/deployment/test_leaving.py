"""Clients that an operator expels, and what a server forgets: the others' run goes on."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from every_method import some
from looped import NAMES, Killed, Notes, steps_to, succeed

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.forgetting import Forgotten, forget
from coterie.errors import CoterieError
from coterie.exchanges.lazy import PART
from coterie.messages import Message, MessageError
from coterie.messages.envelope import Reply, unseal
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_same_state, deploy, server, workers
from coterie.testing.rounds import joined
from tests.written_runs import CONFIG, DESCRIPTION

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"


def expelling(folder: Path, name: str, round: int, after: str | None = None) -> Any:
    """Return a change that expels a client at its step of a round or at another's last reply."""

    def change(client: str, data: bytes) -> bytes:
        reply = unseal(Reply, data)[0]
        when = (name, "step", round) if after is None else (after, "finish", round)
        if (client, reply.kind, reply.turn) == when:
            RunFolder(folder).expel(name)
        return data

    return change


@pytest.mark.parametrize("quorum", some({None}, [None, 3, 2]))
@pytest.mark.parametrize("method", some({"pcl-2"}, ["fedavg", "fedamole", "pcl-2"]))
def test_a_run_goes_on_without_a_client_that_is_expelled(method, quorum, config, tmp_path) -> None:
    more = {"warmup": 1, "every": 1} if method == "pcl-2" else {}
    run = config(method={"name": method, **more}, deployment={"quorum": quorum}, rounds=4)
    folder, notes = tmp_path / "server", Notes()
    loop = Loop(workers(run, tmp_path), change=expelling(folder, "poet", 1))
    server(run, folder, loop, notes).rounds()
    assert notes.lines.count("poet was expelled") == 1
    assert steps_to(loop, "poet") == [0, 1]
    assert steps_to(loop, "whaler") == steps_to(loop, "diarist") == [0, 1, 1, 2, 3]  # begun anew
    assert not [1 for to, order in loop.orders if (to, order.kind) == ("poet", "finish")]
    done = RunFolder(folder)
    assert done.result is not None
    sent = [m["round"] for m in done.metrics() if (m["client"], m["name"]) == ("poet", "bytes/up")]
    assert max(sent) <= 1
    assert forget(done, "poet").rounds == [1]
    assert b"poet" not in done.load("server").encode()
    assert b"poet" not in done.load("engine").encode()


@pytest.mark.slow
def test_expelled_before_a_round_it_is_as_if_it_had_never_come(config, tmp_path) -> None:
    """Compare the shared parameters with those of a run of both other clients."""
    run = config(method={"name": "fedavg"})
    two = run.model_copy(update={"clients": tuple(c for c in run.clients if c.name != "poet")})
    deploy(two, tmp_path / "two")
    folder = tmp_path / "three/server"
    loop = Loop(workers(run, tmp_path / "three"))
    work = server(run, folder, loop)
    RunFolder(folder).expel("poet")
    work.rounds()
    assert_same_state(RunFolder(folder), RunFolder(tmp_path / "two/server"), "server")
    assert steps_to(loop, "poet") == []


@pytest.mark.slow
def test_others_are_waited_for_if_all_with_uploads_are_expelled(config, tmp_path) -> None:
    run = config(method={"name": "fedavg"}, deployment={"quorum": 1, "anyone": True}, rounds=2)
    folder, notes = tmp_path / "server", Notes()

    def others_come(loop: Loop) -> None:
        loop.reconnect("diarist")
        loop.reconnect("whaler")

    loop = Loop(
        workers(run, tmp_path),
        events={12: others_come},
        away={"diarist", "whaler"},
        change=expelling(folder, "poet", 0),
    )
    server(run, folder, loop, notes).rounds()
    assert "poet was expelled" in notes.lines
    assert steps_to(loop, "poet") == [0]
    assert RunFolder(folder).result is not None


@pytest.mark.slow
def test_whoever_is_expelled_at_the_end_is_forgotten_as_well(config, tmp_path) -> None:
    """Expel a client in the last round, or when the others already receive results."""
    for round in (2, 3):
        run = config(method={"name": "fedamole", "experts": 6}, rounds=3)
        folder = tmp_path / str(round)
        loop = Loop(workers(run, folder), change=expelling(folder / "server", "whaler", round))
        if round == 3:
            loop.change = expelling(folder / "server", "whaler", 3, after="diarist")
            loop.lose = lambda name, order: (name, order.kind) == ("whaler", "finish")
        server(run, folder / "server", loop).rounds()
        assert b"whaler" not in RunFolder(folder / "server").load("server").encode()


@pytest.mark.slow
def test_a_run_ends_when_the_last_who_had_not_stopped_is_expelled(config, tmp_path) -> None:
    run = config(
        method={"name": "fedavg"},
        rounds=40,
        evaluation={"keep": "best", "patience": 1},
        training={"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 1e-9},
    )
    folder = tmp_path / "server"
    away = {12: lambda loop: loop.away.add("poet"), 200: lambda _: RunFolder(folder).expel("poet")}
    server(run, folder, Loop(workers(run, tmp_path), events=away)).rounds()
    assert RunFolder(folder).result is not None


def test_a_run_whose_clients_are_all_expelled_says_so(config, tmp_path) -> None:
    run = config(method={"name": "fedavg"})
    folder = tmp_path / "server"

    def all_go(loop: Loop) -> None:
        for name in NAMES:
            RunFolder(folder).expel(name)

    with pytest.raises(CoterieError, match="All clients of the run have been expelled"):
        server(run, folder, Loop(workers(run, tmp_path), events={3: all_go})).rounds()


def test_a_run_begins_without_a_client_that_it_does_not_name(config, tmp_path) -> None:
    """Resume a run that no longer names a client, which may still have a key."""
    run = config(method={"name": "fedavg"}, rounds=2)
    two = run.model_copy(update={"clients": tuple(c for c in run.clients if c.name != "poet")})
    loop = Loop(workers(run, tmp_path))
    work = server(two, tmp_path / "server", loop)
    RunFolder(tmp_path / "server").expel("poet")
    work.rounds()
    assert steps_to(loop, "poet") == []
    assert steps_to(loop, "whaler") == [0, 1]


def test_a_client_that_holds_less_than_others_mix_is_refused(config, tmp_path) -> None:
    """Refuse a client whose uploads all other clients would refuse."""
    local = joined(config(method={"name": "pcl-2", "warmup": 1, "every": 1}))
    hello = local.clients["poet"].hello()
    shapes = dict(list(hello.values["shapes"].items())[:1])
    with pytest.raises(MessageError, match="does not declare the shared tensor"):
        local.value = local.server.join(
            local.value, "poet", Message(values={**hello.values, "shapes": shapes})
        )


@pytest.mark.parametrize("name", ["client", "round", "value", "name", "up", "trained"])
def test_any_client_can_be_forgotten_whatever_its_name(name, tmp_path) -> None:
    config = CONFIG | {"deployment": {"anyone": True}}
    folder = RunFolder.create(tmp_path / "run", DESCRIPTION | {"config": config, "run": "0"})
    other = {"round": 0, "client": "ann", "name": "bytes/up", "value": 7}
    trust = {**other, "name": "trust", "value": {"ann": 0.5, name: 0.5}}
    folder.append([other, {**other, "client": name}, trust])
    folder.finish({"trained": {name: {"loss": 1}}, "traffic": {"up": 3}})
    assert forget(folder, name).rounds == [1]
    assert list(folder.metrics()) == [other, {**trust, "value": {"ann": 0.5}}]
    assert folder.result == {"trained": {}, "traffic": {"up": 3}}


@pytest.mark.slow
def test_a_checkpoint_is_rewritten_whole_or_not_at_all(done, monkeypatch) -> None:
    """Interrupt each write and rename with Ctrl-C."""
    before = {path.name: path.read_bytes() for path in done.checkpoint(3).iterdir()}
    replace, count = Path.replace, 0

    def interrupted(path: Path, to: Path) -> Path:
        nonlocal count
        count -= 1
        if count < 0:
            raise KeyboardInterrupt
        return replace(path, to)

    for stop in range(8):
        count = stop
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", interrupted)
            done.change(lambda name, state: state)
        assert {path.name: path.read_bytes() for path in done.checkpoint(3).iterdir()} == before


@pytest.fixture
def done(config, tmp_path) -> RunFolder:
    """A server's folder after a run that shared scores, with a log."""
    run = config(
        method={"name": "pcl-2", "warmup": 1, "every": 1},
        deployment={"share_metrics": True},
        evaluation={"every": 1},
    )
    deploy(run, tmp_path)
    folder = RunFolder(tmp_path / "server")
    lines = ["10:00 INFO poet is here", "10:01 INFO poet-2 is here", "10:02 INFO whaler is here"]
    (folder.path / "server.log").write_text("\n".join(lines) + "\n")
    (folder.path / "table.md").write_text("| poet | 3.2 |\n")
    return folder


def test_what_a_server_keeps_of_a_client_is_deleted(done) -> None:
    before = {path.name: done.load(path.stem) for path in done.checkpoint(3).glob("*.safetensors")}
    forgotten = forget(done, "poet")
    assert forgotten == Forgotten(metrics=forgotten.metrics, log_lines=2, rounds=[1, 2, 3])
    assert forgotten.metrics > 10
    named = {
        path.relative_to(done.path).as_posix()
        for path in done.path.rglob("*")
        if path.is_file() and b"poet" in path.read_bytes()
    }
    assert named == {"run.json", "without.json"}
    for name in ("diarist", "whaler"):
        kept, was = (
            state["adapter"]
            for file in [f"{PART}uploads-{name}"]
            for state in (done.load(file), before[f"{file}.safetensors"])
        )
        assert kept.keys() == was.keys() > set()
        assert all(torch.equal(tensor, was[n]) for n, tensor in kept.items())
    assert set(done.result["trained"]) == {"diarist", "whaler"}
    assert forget(done, "poet").metrics == 0


def test_what_transforms_remember_of_a_client_is_deleted(config, tmp_path) -> None:
    load_plugin(EXAMPLES / "masked_sum.py")
    deploy(config(rounds=1, aggregation={"transforms": ["masked_sum"]}), tmp_path)
    folder = RunFolder(tmp_path / "server")
    remembered = folder.load("transforms").encode()
    assert remembered.count(b"poet") == remembered.count(b"whaler") > 1  # keys, and links
    forget(folder, "poet")
    remembered = folder.load("transforms").encode()
    assert b"poet" not in remembered
    assert b"whaler" in remembered


@pytest.mark.slow
def test_a_run_goes_on_after_a_client_was_forgotten(config, tmp_path) -> None:
    run = config(method={"name": "fedamole", "experts": 6}, rounds=4)
    folder = tmp_path / "server"
    loop = Loop(workers(run, tmp_path))
    with pytest.raises(Killed):
        server(run, folder, loop, Notes("round 2/4: ")).rounds()
    forget(RunFolder(folder), "poet")
    server(run, folder, loop).rounds()
    assert steps_to(loop, "poet") == [0, 1]
    assert steps_to(loop, "whaler") == [0, 1, 2, 3]
    assert RunFolder(folder).result is not None


def test_what_cannot_be_forgotten_is_said(done, config, tmp_path) -> None:
    with pytest.raises(CoterieError, match="has no client 'nobody'"):
        forget(done, "nobody")
    at_home = coterie.run(config(), out=tmp_path / "home")
    with pytest.raises(CoterieError, match="not the folder of a server's run"):
        forget(RunFolder(at_home.path), "poet")
    with done.lock(), pytest.raises(CoterieError, match="Another process is using"):
        forget(done, "poet")
    (done.checkpoint(3) / "server.safetensors").write_bytes(b"?")
    with pytest.raises(CoterieError, match="is damaged"):
        forget(done, "poet")


def test_the_commands_say_what_was_done_and_what_cannot_be(done) -> None:
    assert "poet is expelled from" in succeed("expel", done.path, "--client", "poet")
    assert json.loads((done.path / "without.json").read_text()) == {"clients": ["poet"]}
    text = succeed("forget", done.path, "--client", "poet")
    assert "all checkpoints except the last" in text
    assert "in 3 rounds, most recently in round 3. Their effect" in text
    assert "coterie server FILE --without poet" in text


def test_a_new_run_leaves_out_whom_it_is_told_to(values, tmp_path) -> None:
    from coterie.config.deployed import check_start, leave_out, load_deployment
    from coterie.config.values import read_values

    run = values(clients=[{"name": name} for name in NAMES], deployment={"quorum": 2})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    config = leave_out(load_deployment(read_values(path), ["diarist", "whaler"]), ["poet"])
    check_start(config, ["diarist", "whaler"])
    assert [client.name for client in config.clients] == ["diarist", "whaler"]
    with pytest.raises(CoterieError, match="or leave the client out with --without poet"):
        check_start(load_deployment(read_values(path), ["diarist"]), ["diarist", "whaler"])
    with pytest.raises(CoterieError, match="no clients left"):
        leave_out(config, ["diarist", "whaler"])

"""Invalid replies and other protocol versions are refused, and do not change the aggregate."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from every_method import some
from looped import NAMES, Killed, Notes, Spoilt, kill, narrow, steps
from torch import Tensor

import coterie
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Message, formats
from coterie.messages.envelope import FAULT_MESSAGES, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.runs import RunFolder
from coterie.testing.loop import RUN, Loop, assert_as_local, deploy, flat, server, workers
from coterie.testing.rounds import joined, step


def lacking(reply: Reply, body: bytes) -> bytes:
    """Return an upload without a tensor of the averaged group."""
    message = Message.decode(body)
    adapter = {n: t for n, t in message["adapter"].items() if n != min(message["adapter"])}
    groups = {**message.groups, "adapter": adapter}
    return seal(reply, Message(message.exchange, groups, message.values).encode())


def heavy(reply: Reply, body: bytes) -> bytes:
    """Return an upload with more tokens than the hello."""
    message = Message.decode(body)
    more = {**message.values, "tokens": message.values["tokens"] + 1}
    return seal(reply, Message(message.exchange, message.groups, more).encode())


def garbage(reply: Reply, body: bytes) -> bytes:
    """Return an upload that is no message."""
    return seal(reply, (1000).to_bytes(8, "little") + np.random.default_rng(0).bytes(5000))


def strange(reply: Reply, body: bytes) -> bytes:
    """Return an upload in another format."""
    message = Message.decode(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "FORMAT", 3)
        patch.setattr(formats, "VERSION", "9.8.7")
        return seal(reply, message.encode())


BAD: dict[Callable[[Reply, bytes], bytes], str] = {
    narrow: "has shape",
    lacking: "is missing from",
    heavy: "when it joined",
    garbage: "not a Coterie message",
    strange: "has format 3 (written by Coterie 9.8.7)",
}


def weighted(config: Any, method: Any = "fedavg", **changes: Any) -> coterie.RunConfig:
    """Return a run whose means are weighted by tokens, with different numbers of tokens."""
    settings = {"quorum": 3, "deadline": 60} | changes.pop("deployment", {})
    tokens = {"aggregation": {"weights": "tokens"}, "deployment": settings}
    return config(**{"method": method, "rounds": 2, "data": {"window": 16}} | tokens | changes)


def naive_mean(uploads: Mapping[str, Message]) -> dict[str, Tensor]:
    """Return the mean of the adapters in uploads, weighted by tokens."""
    weight = {name: upload.values["tokens"] for name, upload in uploads.items()}
    names = next(iter(uploads.values()))["adapter"]
    return {
        n: sum(weight[c] * u["adapter"][n].double() for c, u in uploads.items())  # pyright: ignore[reportReturnType]
        / sum(weight.values())
        for n in names
    }


@pytest.mark.parametrize("spoil", some({narrow}, BAD), ids=lambda spoil: spoil.__name__)
def test_a_bad_upload_does_not_change_the_mean(spoil, config, tmp_path) -> None:
    run = weighted(config, rounds=1, deployment={"quorum": 2, "deadline": 0.001})
    uploads: dict[str, Message] = {}
    bad = Spoilt(spoil, 0, 9)

    def change(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        if reply.kind == "step" and name != "poet":
            uploads[name] = Message.decode(body)
        return bad(name, data)

    notes = Notes()
    loop = Loop(workers(run, tmp_path), change=change)
    server(run, tmp_path / "server", loop, notes).rounds()
    [refusal] = [line for line in notes.lines if "rejected" in line]
    assert "poet" in refusal
    assert BAD[spoil] in refusal
    assert len({upload.values["tokens"] for upload in uploads.values()}) == 2
    mean = naive_mean(uploads)
    state = flat(RunFolder(tmp_path / "server").load("server"))
    assert state.keys() == {("adapter", name) for name in mean}
    for name, tensor in mean.items():
        assert torch.allclose(state["adapter", name].double(), tensor, atol=1e-7)


METHODS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg", "exact": True},
    {"name": "flexlora"},
    {"name": "hetlora"},
    {"name": "fedamole", "experts": 6},
    {"name": "pcl-1", "warmup": 1, "every": 1},
)


@pytest.mark.parametrize("method", some(METHODS[:1], METHODS), ids=lambda method: method["name"])
def test_a_bad_upload_leaves_nothing_behind(method, config, tmp_path, monkeypatch) -> None:
    """Use methods that aggregate each upload when it arrives; a bad one follows a valid one."""
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    run = weighted(config, method)
    local = coterie.run(run, out=tmp_path / "local")
    loop = deploy(run, tmp_path, change=Spoilt(narrow, 0))
    assert [steps(loop)[name, 0] for name in NAMES] == [1, 2, 1]
    assert_as_local(run, tmp_path, RunFolder(local.path))


@pytest.mark.parametrize("turn", some({3}, [1, 3, 4]))
def test_a_server_begun_again_knows_how_many_tokens_everybody_has(turn, config, tmp_path) -> None:
    run = weighted(config)
    local = coterie.run(run, out=tmp_path / "local")
    clients = workers(run, tmp_path)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", Loop(clients, {turn: kill})).rounds()
    again = server(run, tmp_path / "server", Loop(clients))
    again.rounds()
    assert again.exchange._tokens == {
        name: len(worker.run.host.participant.data.train.ids)
        for name, worker in clients.items()
        if worker.run is not None
    }
    assert_as_local(run, tmp_path, RunFolder(local.path))


@pytest.mark.slow
def test_a_restarted_server_refuses_more_tokens(config, tmp_path, monkeypatch) -> None:
    """Check the number of tokens after a restart from a checkpoint, without a new hello."""
    run = weighted(config, deployment={"quorum": 2, "deadline": 0.001})
    clients = workers(run, tmp_path)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", Loop(clients), Notes("round 1/")).rounds()
    notes = Notes()
    again = server(run, tmp_path / "server", Loop(clients, change=Spoilt(heavy, 1, 9)), notes)
    join, joined = again.exchange.join, []
    monkeypatch.setattr(again.exchange, "join", lambda *a: (joined.append(a[0]), join(*a))[1])
    again.rounds()
    assert sorted(joined) == list(NAMES)  # once each, from what is stored
    [refusal] = [line for line in notes.lines if "rejected" in line]
    assert "'poet' claims" in refusal


def test_another_protocol_is_refused_with_a_sentence(config, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("coterie.deployment.server.PROTOCOL", PROTOCOL + 1)
    run, notes, events = weighted(config), Notes(), []
    loop = Loop(workers(run, tmp_path), events={5: kill})
    for worker in loop.workers.values():
        worker.seen = lambda kind, value: events.append((kind, value))
    with pytest.raises(Killed), caplog.at_level("ERROR", "coterie"):
        server(run, tmp_path / "server", loop, notes).rounds()
    sentence = (
        f"the run uses protocol version {PROTOCOL + 1}, but this client uses version {PROTOCOL}; "
        "install the same version of Coterie on both sides"
    )
    assert events == [("fault", sentence)] * 3
    assert sentence in caplog.text
    for name in NAMES:
        assert f"{name} could not join: {FAULT_MESSAGES['protocol']}" in notes.lines
    assert {order.kind for _, order in loop.orders} == {"join"}


@pytest.mark.parametrize(
    "beside", [{"protocol": PROTOCOL + 1, "novelty": [1]}, {"version": "0.0.1"}]
)
def test_an_order_of_another_protocol_may_hold_other_fields(beside, config, tmp_path) -> None:
    worker = workers(weighted(config), tmp_path)["poet"]
    header = {"run": RUN, "client": "poet", "kind": "join", "turn": 0, "config": {}, **beside}
    text = json.dumps(header).encode()
    reply = worker.answer(len(text).to_bytes(4, "big") + text)
    assert unseal(Reply, reply)[0].fault == "protocol"


def test_an_upload_that_waits_on_disk_has_no_name_there(config, tmp_path) -> None:
    run = weighted(config, method="local")
    folder = RunFolder.create(tmp_path / "run", {})
    before = {*folder.path.iterdir()}
    pipeline = Pipeline((), run.method.schema(), 1)
    waiting = Exchange(folder.path, pipeline, run.method.schema(), run.aggregation)
    for round in (0, 1):
        waiting.drop("poet")
        waiting.put("poet", Message(round), lambda upload, exchange: {})
        assert {*folder.path.iterdir()} == before  # so that a kill leaves nothing of it
    assert waiting.counted == ["poet"]


def test_uploads_that_are_sent_again_take_no_more_space(config) -> None:
    local = joined(weighted(config))
    local.open(local.config.turn(0), sorted(local.clients))
    uploads = local.exchange
    sent = {name: local.schema.send("up", step(local, name, 0)) for name in NAMES}
    for number in range(40):
        for name in NAMES if number % 7 == 0 else ("poet",):
            local.take(name, sent[name])
            waiting = sum(len(sent[each]) for each in uploads.counted)
            assert os.fstat(uploads.store._file.fileno()).st_size <= 4 * waiting + len(sent[name])
            for each in uploads.counted:
                assert uploads._uploads[each].read().encode() == sent[each]
    uploads.begin()
    local.take("poet", sent["poet"])
    assert os.fstat(uploads.store._file.fileno()).st_size <= 2 * len(sent["poet"])

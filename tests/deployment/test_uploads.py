"""What a client sends that it should not, and who speaks another language: refused, without a
trace in what the others make together."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from every_method import some
from torch import Tensor

import coterie
from coterie.deployment.client import Worker
from coterie.deployment.status import ServerWatch
from coterie.exchanges.exchange import Exchange
from coterie.exchanges.pipeline import Pipeline
from coterie.messages import Message, formats
from coterie.messages.envelope import FAULT_MESSAGES, Reply, seal, unseal
from coterie.messages.formats import PROTOCOL
from coterie.runs import RunFolder
from coterie.testing.loop import RUN, Loop, assert_as_local, deploy, flat, server, workers
from coterie.testing.rounds import joined, step

NAMES = ("diarist", "poet", "whaler")
Change = Callable[[str, bytes], bytes]


class Notes(ServerWatch):
    """What a person would be told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Killed(Exception):
    """The server's process ends."""


def kill(loop: Loop) -> None:
    raise Killed


def narrow(message: Message) -> bytes:
    """A tensor of the averaged group is too small."""
    adapter = dict(message["adapter"])
    first = min(adapter)
    adapter[first] = adapter[first][:1]
    groups = {**message.groups, "adapter": adapter}
    return Message(message.exchange, groups, message.values).encode()


def lacking(message: Message) -> bytes:
    """A tensor of the averaged group is not there."""
    adapter = dict(message["adapter"])
    del adapter[min(adapter)]
    groups = {**message.groups, "adapter": adapter}
    return Message(message.exchange, groups, message.values).encode()


def heavy(message: Message) -> bytes:
    """More tokens than the hello told of."""
    more = {**message.values, "tokens": message.values["tokens"] + 1}
    return Message(message.exchange, message.groups, more).encode()


def garbage(message: Message) -> bytes:
    """No message."""
    return (1000).to_bytes(8, "little") + np.random.default_rng(0).bytes(5000)


def strange(message: Message) -> bytes:
    """A message in another format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "FORMAT", 3)
        patch.setattr(formats, "VERSION", "9.8.7")
        return message.encode()


BAD: dict[Callable[[Message], bytes], str] = {
    narrow: "has shape",
    lacking: "is missing from",
    heavy: "when it joined",
    garbage: "not a Coterie message",
    strange: "has format 3 (written by Coterie 9.8.7)",
}


def spoiling(spoil: Callable[[Message], bytes], round: int, times: int = 10**6) -> Change:
    """The poet's uploads of a round are bad, so many times."""
    spoilt: list[str] = []

    def change(name: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        if (name, reply.kind, reply.turn) != ("poet", "step", round) or len(spoilt) == times:
            return data
        spoilt.append(name)
        return seal(reply, spoil(Message.decode(body)))

    return change


def weighted(config: Any, method: Any = "fedavg", **changes: Any) -> coterie.RunConfig:
    """A run whose means are weighted by tokens, of which clients have different numbers."""
    settings = {"quorum": 3, "deadline": 60} | changes.pop("deployment", {})
    tokens = {"aggregation": {"weights": "tokens"}, "deployment": settings}
    return config(**{"method": method, "rounds": 2, "data": {"window": 16}} | tokens | changes)


def naive_mean(uploads: Mapping[str, Message]) -> dict[str, Tensor]:
    """Of the adapters in uploads, weighted by tokens."""
    weight = {name: upload.values["tokens"] for name, upload in uploads.items()}
    names = next(iter(uploads.values()))["adapter"]
    return {
        n: sum(weight[c] * u["adapter"][n].double() for c, u in uploads.items())  # pyright: ignore[reportReturnType]
        / sum(weight.values())
        for n in names
    }


@pytest.mark.parametrize("spoil", some({narrow}, BAD), ids=lambda spoil: spoil.__name__)
def test_a_bad_upload_is_refused_by_name_and_the_mean_is_that_of_the_others(
    spoil, config, tmp_path
) -> None:
    run = weighted(config, rounds=1, deployment={"quorum": 2, "deadline": 0.001})
    uploads: dict[str, Message] = {}
    bad = spoiling(spoil, 0)

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
    found = flat(RunFolder(tmp_path / "server").load("server"))
    assert found.keys() == {("adapter", name) for name in mean}
    for name, tensor in mean.items():
        assert torch.allclose(found["adapter", name].double(), tensor, atol=1e-7)


METHODS: tuple[dict[str, Any], ...] = (
    {"name": "fedavg", "exact": True},
    {"name": "flexlora"},
    {"name": "hetlora"},
    {"name": "fedamole", "experts": 6},
    {"name": "pcl-1", "warmup": 1, "every": 1},
)


@pytest.mark.parametrize("method", some(METHODS[:1], METHODS), ids=lambda method: method["name"])
def test_a_bad_upload_leaves_nothing_behind_when_its_round_is_opened_again(
    method, config, tmp_path, monkeypatch
) -> None:
    """Of a method whose server side takes uploads one by one, and has taken others' in by then."""
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    run = weighted(config, method)
    local = coterie.run(run, out=tmp_path / "local")
    loop = deploy(run, tmp_path, change=spoiling(narrow, 0, times=1))
    asked = [name for name, order in loop.orders if (order.kind, order.turn) == ("step", 0)]
    assert {name: asked.count(name) for name in NAMES} == {"diarist": 1, "poet": 2, "whaler": 1}
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
def test_a_server_begun_again_refuses_more_tokens_than_it_was_told_of(
    config, tmp_path, monkeypatch
) -> None:
    """From its checkpoint alone: nobody says hello anew before the upload."""
    run = weighted(config, deployment={"quorum": 2, "deadline": 0.001})

    class Stop(ServerWatch):
        def note(self, text: str) -> None:
            if text.startswith("round 1/"):  # the first round is complete
                raise Killed

    clients = workers(run, tmp_path)
    with pytest.raises(Killed):
        server(run, tmp_path / "server", Loop(clients), Stop()).rounds()
    notes = Notes()
    again = server(run, tmp_path / "server", Loop(clients, change=spoiling(heavy, 1)), notes)
    join, joined = again.exchange.join, []
    monkeypatch.setattr(again.exchange, "join", lambda *a: (joined.append(a[0]), join(*a))[1])
    again.rounds()
    assert sorted(joined) == list(NAMES)  # once each, from what is stored
    [refusal] = [line for line in notes.lines if "rejected" in line]
    assert "'poet' claims" in refusal


def test_another_protocol_is_refused_with_a_sentence(config, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("coterie.deployment.server.PROTOCOL", PROTOCOL + 1)
    run, notes, told = weighted(config), Notes(), []
    loop = Loop(workers(run, tmp_path), events={5: kill})
    for worker in loop.workers.values():
        worker.seen = lambda what, value: told.append((what, value))
    with pytest.raises(Killed), caplog.at_level("ERROR", "coterie"):
        server(run, tmp_path / "server", loop, notes).rounds()
    sentence = (
        f"the run uses protocol version {PROTOCOL + 1}, but this client uses version {PROTOCOL}; "
        "install the same version of Coterie on both sides"
    )
    assert told == [("fault", sentence)] * 3
    assert sentence in caplog.text
    for name in NAMES:
        assert f"{name} could not join: {FAULT_MESSAGES['protocol']}" in notes.lines
    assert {order.kind for _, order in loop.orders} == {"join"}


@pytest.mark.parametrize(
    "beside", [{"protocol": PROTOCOL + 1, "novelty": [1]}, {"version": "0.0.1"}]
)
def test_an_order_of_another_protocol_may_hold_what_this_one_does_not_know(
    beside, config, tmp_path
) -> None:
    worker = workers(weighted(config), tmp_path)["poet"]
    header = {"run": RUN, "client": "poet", "kind": "join", "turn": 0, "config": {}, **beside}
    text = json.dumps(header).encode()
    reply = worker.answer(len(text).to_bytes(4, "big") + text)
    assert unseal(Reply, reply)[0].fault == "protocol"


@pytest.mark.slow
def test_another_version_of_the_package_takes_part(config, tmp_path, monkeypatch) -> None:
    run = weighted(config)
    local = coterie.run(run, out=tmp_path / "local")
    answer = Worker.answer

    def newer(self: Worker, data: bytes) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats, "VERSION", "99.0.0")
            return answer(self, data)

    monkeypatch.setattr(Worker, "answer", newer)
    loop = deploy(run, tmp_path)
    assert any(b"99.0.0" in data for data in loop.seen)
    assert any(formats.VERSION.encode() in data for data in loop.seen)
    assert_as_local(run, tmp_path, RunFolder(local.path))


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
    run = weighted(config)
    local = joined(run)
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

"""An exchange decodes each upload once, also if it reads the upload several times."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from every_method import METHODS
from turns import nth

import coterie
from coterie.engines.local import local_run
from coterie.engines.session import Session
from coterie.errors import Unwritable
from coterie.messages import State
from coterie.runs import RunFolder
from coterie.runs.store import Stored
from coterie.testing.rounds import joined, one_round, step
from coterie.transforms.contract import Context, Transform, mapped

FAST = {"steps": 2, "batch": 2, "precision": "fp32"}


class Remembering(Transform):
    """Sends half of each change, and keeps what it has decoded and how often."""

    name: ClassVar[str] = "remembering"
    summary: ClassVar[str] = "halves"
    decoded: ClassVar[Counter[str]] = Counter()

    def encode(self, update: Any, context: Context) -> Any:
        return mapped(update, lambda tensor: tensor / 2)

    def decode(self, payload: Any, context: Context) -> Any:
        self.decoded[context.client] += 1
        context.memory.values["times"] = context.memory.values.get("times", 0) + 1
        context.memory.groups.update(payload)
        return mapped(payload, lambda tensor: 2 * tensor)


@pytest.fixture
def started(config):
    def start(method: str) -> Any:
        Remembering.decoded.clear()
        run = config(method=method, training=FAST)
        rules = run.aggregation.model_copy(update={"transforms": (Remembering(),)})
        return joined(run.model_copy(update={"aggregation": rules}))

    return start


def opened(local: Any, names: list[str]) -> None:
    """Open the first exchange, and take the uploads of the clients."""
    local.open(nth(0), names)
    local.exchange.begin()
    for name in names:
        local.take(name, local.schema.send("up", step(local, name, 0)))


@pytest.mark.parametrize("method", ["fedavg", "fedalt"])  # fedalt's rows need a second pass
def test_a_repeated_aggregation_ends_in_the_state_of_one(method, started) -> None:
    # One client is asked for its upload again; the others' uploads are kept. Each upload is decoded
    # once.
    states: list[bytes] = []
    for repeats in (False, True):
        local = started(method)
        first, *_ = names = sorted(local.clients)
        opened(local, names)
        if repeats:
            local.exchange.settle()
        again = local.schema.send("up", step(local, first, 0))
        if repeats:
            assert local.exchange.ask_again(first)
            local.exchange.repeat()
        local.take(first, again)
        local.exchange.settle()
        local.close()
        assert Remembering.decoded == dict.fromkeys(names, 1) | {first: 2}
        states.append(b"".join(state.encode() for _, state in local.states()))
        memories = local.transforms.client_memories
        times = {n: memories[n].memories["0-remembering.up"].values for n in names}
        assert all(time == {"times": 1} for time in times.values())
    assert states[0] == states[1]
    assert all(torch.isfinite(t).all() for t in local.value.adapter.values())


@pytest.mark.parametrize(
    ("method", "reads"),
    [
        ("fedavg", 1),
        ("fedavg, exact", 2),
        ("hetlora", 2),  # the mean, and the pairs
        ("pcl-2", 2),  # for the downloads of the two other clients
        ("fedlease", 1),  # after its first exchange, no client is without a cluster
    ],
)
def test_a_server_reads_uploads_as_often_as_needed(method, reads, config, monkeypatch) -> None:
    local = joined(config(method=METHODS[method], training=FAST, rounds=2))
    one_round(local, 0)
    names, counts = sorted(local.clients), Counter[str]()
    load = Stored.load

    def counting(stored: Stored) -> State:
        for name, upload in local.exchange._uploads.items():
            counts[name] += upload.tensors is stored
        return load(stored)

    monkeypatch.setattr(Stored, "load", counting)
    one_round(local, 1)
    assert counts == dict.fromkeys(names, reads)


def test_an_upload_that_cannot_be_stored_is_not_the_clients_fault(config, monkeypatch) -> None:
    # The server's disk is full; a client that is excluded would not be asked again.
    local = joined(config(method="fedavg", training=FAST))
    local.exchange.strict = False
    names = sorted(local.clients)
    local.open(nth(0), names)
    local.exchange.begin()
    uploads = {name: local.schema.send("up", step(local, name, 0)) for name in names}
    with monkeypatch.context() as full:
        full.setattr(local.exchange.store, "put", no_room)
        with pytest.raises(Unwritable):
            local.take(names[0], uploads[names[0]])
    assert not local.exchange.refused
    for name in names:
        local.take(name, uploads[name])
    local.exchange.settle()
    assert local.exchange.counted == names
    local.close()


def test_a_server_that_is_restored_waits_for_the_next_turn(config, tmp_path) -> None:
    # Its transforms would otherwise encode the result as the download of the first turn.
    run = config(method="fedavg", training=FAST, rounds=2)
    folder, session = RunFolder(coterie.run(run, out=tmp_path / "run").path), Session(run)
    again = local_run(run, session.base, session.participants(run), folder)
    again.restore()
    assert again.transforms.turn.number == again.exchange.turn.number == 2


def no_room(*_: Any) -> None:
    raise Unwritable("Could not write: No space left on device.")

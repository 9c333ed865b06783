"""Clients join a deployed run without holding others up."""

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from looped import Spoilt

from coterie.deployment import joins
from coterie.deployment.joins import Joins
from coterie.messages import Message, MessageError, State
from coterie.messages.envelope import seal
from coterie.methods.contract import Server
from coterie.methods.value import Value
from coterie.testing.loop import deploy, folder


class Slow(Server):
    """Prepares for the poet until it is let go, and for the whaler in vain."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.joined: list[str] = []

    def prepare(self, client: str, hello: Message) -> None:
        if client == "poet":
            self.go_on.wait(30)
        if client == "whaler":
            raise MessageError("The client sent no vocabulary.")

    def join(self, value: Value, client: str, hello: Message) -> Value:
        self.joined.append(client)
        return value


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[Slow, Joins]:
    monkeypatch.setattr(joins, "INITIAL_WAIT", 0.2)
    server = Slow()
    part: Any = SimpleNamespace(
        server=server,
        config=SimpleNamespace(clients=[]),
        schema=SimpleNamespace(receive=lambda way, data: Message(0)),
        join=lambda name, hello: server.join(server.initial(), name, hello),
    )
    return server, Joins(part, math.inf)


def test_what_takes_long_goes_on_aside(slow: tuple[Slow, Joins]) -> None:
    server, joins = slow
    joins.begin("poet", b"hello")
    joins.begin("diarist", b"hi")
    assert list(joins.ended()) == [("diarist", None)]
    assert joins.hellos == {"diarist": b"hi"}
    with pytest.raises(MessageError, match="still preparing for this client"):
        joins.begin("poet", b"hello")
    server.go_on.set()
    end = time.monotonic() + 20
    while not (ended := list(joins.ended())):
        assert time.monotonic() < end
    assert ended == [("poet", None)]
    assert server.joined == ["diarist", "poet"]
    assert list(joins.ended()) == []


def test_what_fails_is_told_and_may_be_tried_again(slow: tuple[Slow, Joins]) -> None:
    server, joins = slow
    for _ in range(2):
        joins.begin("whaler", b"hello")
        [(name, error)] = joins.ended()
        assert (name, str(error)) == ("whaler", "The client sent no vocabulary.")
    assert (joins.hellos, server.joined) == ({}, [])


def test_an_earlier_lifes_clients_are_taken_in_at_once(slow: tuple[Slow, Joins]) -> None:
    server, joins = slow
    hellos = {name: torch.tensor([*b"hello"], dtype=torch.uint8) for name in ("diarist", "poet")}
    joins.restore(State({"hellos": hellos}, {"base": "0"}), {"poet"})
    assert (joins.hellos, server.joined) == ({"diarist": b"hello"}, ["diarist"])


def test_a_hello_that_is_refused_may_come_again(config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("coterie.deployment.seats.RETRY", 0.0)
    spoilt = Spoilt(lambda reply, _: seal(reply, b"no message"), 0, kind="join")
    run = config(method="fedavg", deployment={"quorum": 3, "deadline": 60})
    deploy(run, tmp_path, change=spoilt)
    assert spoilt.count == 1
    assert folder(run, tmp_path, "poet").result is not None

"""A round that a server opens again with another download, after it was killed or lost a client."""

import time

import pytest

from coterie.deployment.client import Worker
from coterie.deployment.quorum import Quorum
from coterie.deployment.seats import Seat
from coterie.messages import Message
from coterie.messages.envelope import Order, Reply, seal, unseal
from coterie.runs import RunFolder
from coterie.testing.loop import Loop, assert_equal, folder, server, site, workers

NAMES = ("diarist", "poet", "whaler")


class Recorded(Loop):
    """A network that keeps the orders to one client."""

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        if client == "poet":
            self.sent = [*getattr(self, "sent", []), data]
        return super().send(client, data, turn, seconds)


def with_other_values(data: bytes) -> bytes:
    """Return an order whose download has other values."""
    order, body = unseal(Order, data)
    message = Message.decode(body)
    groups = {
        group: {name: tensor + 0.01 for name, tensor in tensors.items()}
        for group, tensors in message.groups.items()
    }
    return seal(order, Message(message.exchange, groups, message.values).encode())


def test_a_step_is_undone_when_its_round_is_opened_again(config, tmp_path) -> None:
    run = config(rounds=2)
    network = Recorded(workers(run, tmp_path / "whole"))
    server(run, tmp_path / "server", network).rounds()
    join, first, second, _ = network.sent
    states = []
    for orders in ([second], [with_other_values(second), second]):
        out = tmp_path / str(len(orders))
        worker = Worker(site(run, "poet", out))
        for data in (join, first, *orders):
            worker.answer(data)
        states.append(folder(run, out, "poet").load("client-poet"))
        worker.close()
    assert_equal(states[0], states[1], "poet")


@pytest.mark.parametrize("fault", ["disconnects", "stalls", "is rejected and disconnects"])
def test_a_round_begins_again_with_a_later_client(fault, config, tmp_path, caplog) -> None:
    """Drop the upload of a client, so that the others are below the quorum."""
    run = config(method={"name": "fedavg"}, rounds=2, deployment={"quorum": 2, "deadline": 0.01})
    replies: list[bytes] = []

    def lose(name: str, order: Order) -> bool:
        if order.kind == "finish":
            loop.away.discard("whaler")
        if (name, order.kind) != ("whaler", "step"):
            return False
        replies.append(b"")
        if "rejected" in fault and len(replies) == 1:
            return False
        loop.away.discard("diarist")
        if "disconnects" in fault:
            loop.away.add("whaler")
        return True

    def change(name: str, data: bytes) -> bytes:
        reply = unseal(Reply, data)[0]
        return seal(reply, b"?") if (name, reply.kind) == ("whaler", "step") else data

    loop = Loop(workers(run, tmp_path), away={"diarist"}, lose=lose, change=change)
    with caplog.at_level("INFO", "coterie.deployment.client"):
        server(run, tmp_path / "server", loop).rounds()
    assert RunFolder(tmp_path / "server").result is not None
    sent = {n: [o.turn for to, o in loop.orders if (to, o.kind) == (n, "step")] for n in NAMES}
    assert sent["diarist"] == [0, 1]
    assert sent["poet"] == [0, 0, 1]
    assert "round 1: sent the stored upload again" in caplog.messages


@pytest.mark.parametrize(
    ("members", "waiting", "diverged", "ready", "late", "expected"),
    [
        ("ab", "b", "", "ac", True, True),
        ("ab", "b", "", "abc", True, True),  # the client that has not replied is connected
        ("ab", "b", "", "ac", False, False),
        ("ab", "b", "", "a", True, False),
        ("ab", "b", "", "bc", True, False),  # the client that has replied has disconnected
        ("abc", "c", "", "abd", True, False),  # the round has enough uploads
        ("ab", "b", "a", "a", True, False),
        ("ab", "b", "a", "ac", True, True),
    ],
)
def test_a_round_begins_again(members, waiting, diverged, ready, late, expected, config) -> None:
    seats = {name: Seat(present="1", joined=True) for name in ready}
    quorum = Quorum(config(deployment={"quorum": 2, "anyone": True}), seats)
    end = time.monotonic() + (-1 if late else 60)
    assert quorum.begins_again(members, waiting, diverged, end) == expected

"""A round that a server opens again with another download, after it was killed or lost a client."""

from coterie.deployment.client import Worker
from coterie.messages import Message
from coterie.messages.envelope import Order, seal, unseal
from coterie.testing.loop import Loop, assert_equal, folder, server, site, workers


class Recorded(Loop):
    """A network that keeps the orders to one client."""

    def send(self, client: str, data: bytes, round: int, seconds: float) -> str:
        if client == "poet":
            self.sent = [*getattr(self, "sent", []), data]
        return super().send(client, data, round, seconds)


def with_other_values(data: bytes) -> bytes:
    """Return an order whose download has other values."""
    order, body = unseal(Order, data)
    message = Message.decode(body)
    groups = {
        group: {name: tensor + 0.01 for name, tensor in tensors.items()}
        for group, tensors in message.groups.items()
    }
    return seal(order, Message(message.round, groups, message.values).encode())


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

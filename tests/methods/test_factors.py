"""FedSA-LoRA, Fed-ALoRA and RoLoRA: which factor is sent, averaged, trained, and kept."""

from typing import Any

import pytest
from tensors import close_to, mean_of
from torch import Tensor

from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round


def factors(client: Any, factor: str) -> dict[str, Tensor]:
    """Return copies of a client's A or B, by the name of the tensor."""
    parameters = client.parameters().items()
    return copied({n: p.tensor for n, p in parameters if p.factor == factor})


CASES = [("fedsa", "A", "B"), ("fed-alora", "B", "A")]


@pytest.mark.parametrize(("method", "shared", "private"), CASES)
def test_one_factor_is_averaged_and_the_other_stays(method, shared, private, config) -> None:
    local: Any = joined(config(method=method, rounds=2))
    clients = list(local.clients.values())
    starts = {factor: [factors(c, factor) for c in clients] for factor in "AB"}
    for start in starts.values():
        assert all(close_to(start[0], other) for other in start[1:])
    uploads = one_round(local, 0)
    trained = {factor: [factors(c, factor) for c in clients] for factor in "AB"}
    for factor in "AB":  # every client has trained both factors
        assert not any(map(close_to, starts[factor], trained[factor]))
    for upload, own in zip(uploads.values(), trained[shared], strict=True):
        assert close_to(upload["adapter"], own)
    mean = mean_of(trained[shared])
    for name, client in local.clients.items():
        client.receive(down(local, name))
        assert close_to(factors(client, shared), mean)
    for client, own in zip(clients, trained[private], strict=True):
        assert close_to(factors(client, private), own)


def test_rolora_trains_and_averages_b_and_a_in_turn(config) -> None:
    local: Any = joined(config(method="rolora", rounds=4))
    clients = list(local.clients.values())
    for exchange, (factor, other) in enumerate(("BA", "AB", "BA", "AB")):
        before = {f: factors(clients[0], f) for f in "AB"}
        uploads = one_round(local, exchange)
        for client, upload in zip(clients, uploads.values(), strict=True):
            trained = factors(client, factor)
            assert close_to(upload["adapter"], trained)
            assert exchange == 0 or not close_to(trained, before[factor])
        mean = mean_of([factors(c, factor) for c in clients])
        for name, client in local.clients.items():
            client.receive(down(local, name))
            assert close_to(factors(client, factor), mean)
        # The factor that was not trained is that of the previous exchange.
        assert all(close_to(factors(c, other), before[other]) for c in clients)

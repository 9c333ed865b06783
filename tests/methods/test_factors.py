"""FedSA-LoRA, Fed-ALoRA and RoLoRA: which factor is sent, averaged, trained, and kept."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie.testing.rounds import down, joined, one_round


def factors(client: Any, factor: str) -> dict[str, Tensor]:
    """Return copies of a client's A or B, by the name of the tensor."""
    parameters = client.parameters().items()
    return {n: p.tensor.detach().clone() for n, p in parameters if p.factor == factor}


def means(tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean over clients of each tensor, in float64."""
    return {name: torch.stack([t[name].double() for t in tensors]).mean(0) for name in tensors[0]}


def close(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    assert one.keys() == other.keys() != set()
    return all(torch.allclose(one[n].double(), other[n].double(), atol=1e-7) for n in one)


@pytest.mark.parametrize(
    ("method", "shared", "private"), [("fedsa", "A", "B"), ("fed-alora", "B", "A")]
)
def test_one_factor_is_averaged_and_the_other_stays(method, shared, private, config) -> None:
    local: Any = joined(config(method=method, rounds=2))
    clients = list(local.clients.values())
    starts = {factor: [factors(c, factor) for c in clients] for factor in "AB"}
    for start in starts.values():
        assert all(close(start[0], other) for other in start[1:])
    uploads = one_round(local, 0)
    trained = {factor: [factors(c, factor) for c in clients] for factor in "AB"}
    for factor in "AB":  # every client has trained both factors
        assert not any(map(close, starts[factor], trained[factor]))
    for upload, own in zip(uploads.values(), trained[shared], strict=True):
        assert close(upload["adapter"], own)
    mean = means(trained[shared])
    for name, client in local.clients.items():
        client.receive(down(local, name))
        assert close(factors(client, shared), mean)
    for client, own in zip(clients, trained[private], strict=True):
        assert close(factors(client, private), own)


def test_rolora_trains_and_averages_b_and_a_in_turn(config) -> None:
    local: Any = joined(config(method="rolora", rounds=4))
    clients = list(local.clients.values())
    for exchange, (factor, other) in enumerate(("BA", "AB", "BA", "AB")):
        before = {f: factors(clients[0], f) for f in "AB"}
        uploads = one_round(local, exchange)
        for client, upload in zip(clients, uploads.values(), strict=True):
            trained = factors(client, factor)
            assert close(upload["adapter"], trained)
            assert exchange == 0 or not close(trained, before[factor])
        mean = means([factors(c, factor) for c in clients])
        for name, client in local.clients.items():
            client.receive(down(local, name))
            assert close(factors(client, factor), mean)
        if exchange:  # the factor that was not trained is that of the previous exchange
            assert all(close(factors(c, other), before[other]) for c in clients)


def test_the_mean_of_b_is_the_mean_of_the_products(config) -> None:
    local: Any = joined(config(method="rolora", rounds=1))
    one_round(local, 0)
    parameters = local.clients["poet"].parameters()
    pairs = {p.path: n for n, p in parameters.items() if p.factor == "A"}
    clients = [c.parameters() for c in local.clients.values()]
    shared = local.value.adapter
    for name, parameter in parameters.items():
        if parameter.factor == "B":
            A = pairs[parameter.path]
            products = [c[name].tensor.double() @ c[A].tensor.double() for c in clients]
            mean = shared[name].double() @ shared[A].double()
            assert torch.allclose(torch.stack(products).mean(0), mean, atol=1e-8)

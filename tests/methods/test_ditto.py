"""Ditto: one exchange equals a naive version of algorithm 1, with the pull after the step."""

from typing import Any

import torch
from naive_lora import ONE_STEP, record
from tensors import close_to, equal
from turns import nth

from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round


def test_the_personal_adapter_follows_algorithm_1(config) -> None:
    method = {"name": "ditto", "proximity": 0.3}
    local: Any = joined(config(method=method, rounds=2, training=ONE_STEP))
    client = local.clients["poet"]
    one_round(local, 0)
    client.receive(down(local, "poet"))
    w, v = copied(client.adapter.tensors()), copied(client.personal.tensors())
    assert not equal(v, w)
    steps = record(client.personal_training, client.personal.tensors())
    client.train(nth(1))
    [(_, g)] = steps
    stepped = {n: v[n] - 0.1 * g[n] for n in v}
    expected = {n: x - 0.1 * 0.3 * (x - w[n]) for n, x in stepped.items()}
    assert close_to(client.personal.tensors(), expected, atol=1e-7)
    combined = {n: v[n] - 0.1 * (g[n] + 0.3 * (v[n] - w[n])) for n in v}  # algorithm 1
    for n, difference in ((n, expected[n] - combined[n]) for n in v):
        assert torch.allclose(difference, 0.1 * 0.3 * 0.1 * g[n], atol=1e-7)
    upload = client.upload(nth(1))["adapter"]
    assert equal(upload, client.adapter.tensors())
    assert not equal(upload, client.personal.tensors())


def test_without_proximity_the_personal_adapter_trains_alone(config) -> None:
    def personal(**settings: Any) -> dict[str, torch.Tensor]:
        local: Any = joined(config(method={"name": "ditto", **settings}, rounds=2))
        for exchange in range(2):
            one_round(local, exchange)
        return local.clients["poet"].personal.tensors()

    alone, drawn = personal(proximity=0.0), personal(proximity=10.0)
    assert not equal(alone, drawn)

"""Ditto: one exchange equals a naive version of algorithm 1."""

from typing import Any

import torch
from turns import nth

from coterie.testing.rounds import down, joined, one_round


def test_the_personal_adapter_follows_algorithm_1(config) -> None:
    training = {"optimiser": {"name": "sgd"}, "learning_rate": 0.1, "schedule": "constant"}
    training |= {"warmup": 0.0, "steps": 1, "batch": 2, "precision": "fp32"}
    method = {"name": "ditto", "proximity": 0.3}
    local: Any = joined(config(method=method, rounds=2, training=training))
    client = local.clients["poet"]
    one_round(local, 0)
    client.receive(down(local, "poet"))
    w = {n: t.detach().clone() for n, t in client.adapter.tensors().items()}
    v = {n: t.detach().clone() for n, t in client.personal.tensors().items()}
    assert any(not torch.equal(v[name], w[name]) for name in v)
    seen = {}
    loss = client.personal_training._loss

    def kept(*args: Any) -> torch.Tensor:
        seen["loss"] = loss(*args)
        names, tensors = zip(*client.personal.tensors().items(), strict=True)
        grads = torch.autograd.grad(seen["loss"], tensors, retain_graph=True)
        seen["grads"] = dict(zip(names, grads, strict=True))
        return seen["loss"]

    client.personal_training._loss = kept
    client.train(nth(1))
    for name, tensor in client.personal.tensors().items():
        expected = v[name] - 0.1 * (seen["grads"][name] + 0.3 * (v[name] - w[name]))
        assert torch.allclose(tensor, expected, atol=1e-7)
    upload = client.upload(nth(1))["adapter"]
    assert upload.keys() == client.adapter.tensors().keys()
    assert all(torch.equal(upload[n], t) for n, t in client.adapter.tensors().items())
    assert any(not torch.equal(upload[n], t) for n, t in client.personal.tensors().items())


def test_without_proximity_the_personal_adapter_trains_alone(config) -> None:
    def personal(**settings: Any) -> dict[str, torch.Tensor]:
        local: Any = joined(config(method={"name": "ditto", **settings}, rounds=2))
        for exchange in range(2):
            one_round(local, exchange)
        return local.clients["poet"].personal.tensors()

    alone, drawn = personal(proximity=0.0), personal(proximity=10.0)
    assert alone.keys() == drawn.keys()
    assert any(not torch.equal(alone[name], drawn[name]) for name in alone)

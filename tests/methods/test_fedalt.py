"""FedALT: one exchange equals a naive version of the paper's equations."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from naive_lora import ONE_STEP, with_outputs
from tensors import close_to, fill, mean_of
from torch import Tensor
from turns import nth

from coterie.methods.tensors import copied
from coterie.testing.rounds import close, down, joined, one_round, take, up

SCALE = 32 / 8
"""alpha / r, by default."""
IDS = torch.arange(3, 15)[None]


def values(client: Any) -> dict[str, Tensor]:
    return copied(client.adapter.tensors())


def mixture(tensors: Mapping[str, Tensor], path: str, x: Tensor) -> Tensor:
    """Return what the two pairs of a layer add to the layer's output."""
    weights = (x @ tensors[f"router/{path}.weight"].t()).softmax(-1)
    outputs = [
        x @ tensors[f"generalist.{i}/{path}.A"].t() @ tensors[f"generalist.{i}/{path}.B"].t()
        for i in range(2)
    ]
    return SCALE * (weights[..., :1] * outputs[0] + weights[..., 1:] * outputs[1])


def mixtures(client: Any, tensors: Mapping[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    paths = {parameter.path for parameter in client.parameters().values()}
    return {path: partial(mixture, tensors, path) for path in paths}


def of(expert: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors of the pairs with an index, by path and factor."""
    start = f"generalist.{expert}/"
    return {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}


def test_one_exchange_follows_the_equations(config) -> None:
    local: Any = joined(config(method="fedalt", rounds=2, training=ONE_STEP))
    clients, trained, uploads = local.clients, {}, {}
    local.open(nth(0), sorted(clients))
    for name, client in clients.items():
        fill(client.adapter.tensors(), 0.1, sum(map(ord, name)))
        start = values(client)
        leaves = {n: t.requires_grad_() for n, t in start.items() if "generalist.0" not in n}
        batch = client.training._batch(client.training.levels[0], 0, 0)
        with with_outputs(client.context.base.model, mixtures(client, start)) as model:
            loss = batch.loss(model)[0]
        grads = torch.autograd.grad(loss, list(leaves.values()))
        client.train(nth(0))
        trained[name], uploads[name] = values(client), up(local, name, 0)
        steps = {n: start[n] - 0.1 * g for n, g in zip(leaves, grads, strict=True)}
        assert close_to({n: trained[name][n] for n in leaves}, steps)
        assert not close_to({n: trained[name][n] for n in leaves}, leaves)
        assert close_to(of(0, trained[name]), of(0, start))
        assert close_to(of(1, uploads[name]["adapter"]), of(1, trained[name]))
        assert len(uploads[name]["adapter"]) == len(of(1, start))
    close(local, 0, uploads)
    for name, client in clients.items():
        client.receive(down(local, name))
        others = mean_of([of(1, trained[c]) for c in clients if c != name])
        named = {f"generalist.0/{n}": t.float() for n, t in others.items()}
        expected = trained[name] | named
        assert close_to(values(client), expected)
        logits = client.model()(input_ids=IDS).logits
        with with_outputs(client.context.base.model, mixtures(client, expected)) as model:
            assert torch.allclose(logits, model(input_ids=IDS).logits, atol=1e-4)


def test_all_clients_start_alike_and_without_effect(config) -> None:
    local: Any = joined(config(method="fedalt"))
    clients = list(local.clients.values())
    assert all(close_to(values(clients[0]), values(client)) for client in clients[1:])
    logits = clients[0].model()(input_ids=IDS).logits
    with with_outputs(clients[0].context.base.model, {}) as model:
        assert torch.equal(logits, model(input_ids=IDS).logits)


def test_the_mean_is_over_the_others_that_took_part(config) -> None:
    local: Any = joined(config(method="fedalt", rounds=2))
    one_round(local, 0)
    take(local)
    before = {name: values(client) for name, client in local.clients.items()}
    poet = one_round(local, 1, ["poet"])["poet"]["adapter"]
    take(local)
    assert close_to(of(0, values(local.clients["poet"])), of(0, before["poet"]))
    for name in ("diarist", "whaler"):
        after = values(local.clients[name])
        assert close_to(of(0, after), of(1, poet))
        assert close_to(of(1, after), of(1, before[name]))


def test_a_single_client_trains_beside_a_pair_without_effect(config) -> None:
    clients = [{"name": "poet", "path": "poet.txt"}]
    local: Any = joined(config(method="fedalt", rounds=2, clients=clients))
    for exchange in range(2):
        one_round(local, exchange)
    take(local)
    tensors = values(local.clients["poet"])
    assert not any(t.any() for n, t in of(0, tensors).items() if n.endswith("B"))
    assert all(t.any() for t in of(1, tensors).values())

"""FedDPA-T: one exchange equals a naive version of the paper's equations."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from naive_lora import ONE_STEP, with_outputs
from tensors import close_to, fill, mean_of
from torch import Tensor
from turns import nth

import coterie
from coterie.methods.tensors import copied
from coterie.testing.rounds import close, down, joined, one_round, take, up

SCALE = 16 / 8
"""alpha / r, by default."""
WEIGHT = 0.3
IDS = torch.arange(3, 15)[None]

Tensors = Mapping[str, Tensor]


def run_of(config: Any) -> coterie.RunConfig:
    method = {"name": "feddpa", "weight": WEIGHT}
    return config(method=method, rounds=2, training=ONE_STEP)


def values(adapter: Any) -> dict[str, Tensor]:
    return copied(adapter.tensors())


def filled(adapter: Any, seed: int) -> dict[str, Tensor]:
    """Fill an adapter's tensors with fixed values, and return copies that require gradients."""
    fill(adapter.tensors(), 0.1, seed)
    return {name: tensor.requires_grad_() for name, tensor in values(adapter).items()}


def outputs(client: Any, *terms: tuple[float, Tensors]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return, by the path of a layer, the function that adds weighted low-rank pairs."""

    def of(path: str) -> Callable[[Tensor], Tensor]:
        A, B = f"dense/{path}.A", f"dense/{path}.B"
        return lambda x: torch.stack(
            [SCALE * weight * (x @ pair[A].t() @ pair[B].t()) for weight, pair in terms]
        ).sum(0)

    return {path: of(path) for path in {p.path for p in client.parameters().values()}}


def step(client: Any, training: Any, own: Tensors, *terms: tuple[float, Tensors]) -> Tensors:
    """Return the pairs `own` after one step of SGD with the learning rate 0.1."""
    batch = training._batch(training.levels[0], 1, 0)
    with with_outputs(client.context.base.model, outputs(client, *terms)) as model:
        grads = torch.autograd.grad(batch.loss(model)[0], list(own.values()))
    return {n: t.detach() - 0.1 * g for (n, t), g in zip(own.items(), grads, strict=True)}


def logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def test_one_exchange_follows_the_equations(config) -> None:
    local: Any = joined(run_of(config))
    clients, uploads, personal = local.clients, {}, {}
    local.open(nth(1), sorted(clients))
    for seed, (name, client) in enumerate(sorted(clients.items())):
        g, v = filled(client.adapter, seed), filled(client.personal, 10 + seed)
        client.train(nth(1))
        expected = step(client, client.personal_training, v, (WEIGHT, v), (1 - WEIGHT, g))
        personal[name] = values(client.personal)
        assert close_to(personal[name], expected)
        assert not close_to(personal[name], v)
        uploads[name] = up(local, name, 1)
        alone = step(client, client.training, g, (1.0, g))
        assert close_to(uploads[name]["adapter"], alone)
        assert not close_to(uploads[name]["adapter"], g)
    close(local, 1, uploads)
    means = mean_of(upload["adapter"] for upload in uploads.values())
    mean = {n: tensor.float() for n, tensor in means.items()}
    for name, client in clients.items():
        client.receive(down(local, name))
        assert close_to(values(client.adapter), mean)
        assert close_to(values(client.personal), personal[name])
        scored = logits(client.model())
        terms = (WEIGHT, personal[name]), (1 - WEIGHT, mean)
        with with_outputs(client.context.base.model, outputs(client, *terms)) as model:
            assert torch.allclose(scored, logits(model), atol=1e-4)


def test_the_first_round_trains_only_the_averaged_pairs(config) -> None:
    local: Any = joined(run_of(config))
    starts = {name: values(client.personal) for name, client in local.clients.items()}
    one_round(local, 0)
    take(local)
    for name, client in local.clients.items():
        assert close_to(values(client.personal), starts[name])
        scored, shared = logits(client.model()), values(client.adapter)
        with with_outputs(client.context.base.model, outputs(client, (1.0, shared))) as model:
            assert torch.allclose(scored, logits(model), atol=1e-4)

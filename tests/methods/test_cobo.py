"""CoBo: one exchange equals a naive version of algorithm 1, and clients that disagree part."""

from typing import Any

import pytest
import torch
from naive_lora import ONE_STEP, record
from torch import Tensor

from coterie.methods.tensors import copied, copy
from coterie.testing.rounds import close, down, joined, one_round, step


def run_of(config, **method: Any) -> Any:
    return joined(config(method={"name": "cobo", **method}, rounds=3, training=ONE_STEP))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return an adapter as one vector."""
    return torch.cat([tensors[name].detach().flatten() for name in sorted(tensors)]).double()


def adapters(local: Any) -> dict[str, Tensor]:
    return {name: flat(client.shared) for name, client in local.clients.items()}


def simplex(weights: list[float]) -> list[float]:
    """Project onto the simplex by bisection of the shift."""
    low, high = min(weights) - 1, max(weights)
    for _ in range(200):
        shift = (low + high) / 2
        above = sum(max(w - shift, 0) for w in weights) > 1
        low, high = (shift, high) if above else (low, shift)
    return [max(w - low, 0) for w in weights]


@pytest.mark.parametrize("domain", ["simplex", "box"])
def test_an_exchange_follows_algorithm_1(domain, config) -> None:
    local = run_of(config, domain=domain, proximity=0.3, weight_step=0.5)
    names = sorted(local.clients)
    initial = 0.5 if domain == "simplex" else 1.0
    for i in names:
        assert local.server.row(local.value, i) == {j: initial if j != i else 0.0 for j in names}
    one_round(local, 0)
    x, before = adapters(local), {i: local.server.row(local.value, i) for i in names}
    steps = {name: record(c.training, c.shared) for name, c in local.clients.items()}
    uploads = one_round(local, 1)
    # Equation 4: x_i <- x_i - eta (g_i + rho sum_k w_ik (x_i - x_k)), in the order of the authors'
    # code: the term of rho is subtracted after the step.
    for i, after in adapters(local).items():
        [(start, gradient)] = steps[i]
        assert torch.equal(flat(start), x[i])
        stepped = x[i] - 0.1 * flat(gradient)
        pull = sum((before[i][k] * (stepped - x[k]) for k in names if k != i), torch.zeros(()))
        assert torch.allclose(after, stepped - 0.1 * 0.3 * pull, atol=1e-7)
        assert pull.abs().max() > 1e-4
    # Equation 3: w_ij <- Proj(w_ij + gamma <g_i, g_j>), with gradients at (x_i + x_j) / 2.
    for i in names:
        row = dict(before[i])
        for j in (j for j in names if j != i):
            products = uploads[i]["gradients"][j].double() * uploads[j]["gradients"][i].double()
            row[j] += 0.5 * products.sum().item()
        values = [row[j] for j in names]
        expected = [min(max(v, 0.0), 1.0) for v in values] if domain == "box" else simplex(values)
        assert list(local.server.row(local.value, i).values()) == pytest.approx(expected, abs=1e-9)


def test_gradients_are_computed_at_the_midpoint(config) -> None:
    # At the midpoint with itself, a client has the gradient at its own adapter.
    local = run_of(config)
    one_round(local, 0)
    local.open(local.config.turn(1), sorted(local.clients))
    poet, whaler = local.clients["poet"], local.clients["whaler"]
    x, y = copied(poet.shared), copied(whaler.shared)
    gradients = step(local, "poet", 1)["gradients"]
    copy({n: (x[n] + y[n]) / 2 for n in x}, poet.shared)
    assert torch.allclose(poet._gradient("whaler", 1), gradients["whaler"], atol=1e-8)
    copy(x, poet.shared)
    assert not torch.allclose(poet._gradient("whaler", 1), gradients["whaler"], atol=1e-8)


def test_clients_with_opposite_gradients_part(config) -> None:
    local = run_of(config, domain="box", weight_step=1.0)
    one_round(local, 0)
    local.open(local.config.turn(1), sorted(local.clients))
    uploads = {name: step(local, name, 1) for name in sorted(local.clients)}
    sign = {"diarist": 1.0, "poet": -1.0, "whaler": 1.0}
    for i, upload in uploads.items():
        for gradient in upload["gradients"].values():
            gradient.fill_(sign[i])
    close(local, 1, uploads)
    assert local.server.row(local.value, "diarist") == {"diarist": 0.0, "poet": 0.0, "whaler": 1.0}
    assert down(local, "poet").values["weights"] == {"diarist": 0.0, "whaler": 0.0}
    assert not down(local, "poet")["mean"]


def test_pairs_are_sampled(config) -> None:
    local = run_of(config, pair_share=0.5)
    names, seen = sorted(local.clients), set()
    for exchange in range(20):
        local.open(local.config.turn(exchange), names)
        partners = {i: local.server.partners(i, local.exchange) for i in names}
        assert all(i in partners[j] for i in names for j in partners[i])
        assert all(down(local, i).peers.keys() == set(partners[i]) for i in names)
        seen |= {sum(map(len, partners.values())) // 2}
    assert len(seen) > 2


def test_the_projection_survives_extreme_weights(config) -> None:
    server = run_of(config).server
    for c, expected in ((1e70, [0.0, 0.0, 1.0]), (0.3, [0.0, 0.6, 0.4])):
        projected = server._projected({"a": -1e70, "b": 0.5, "c": c})
        assert projected == pytest.approx(dict(zip("abc", expected, strict=True)))

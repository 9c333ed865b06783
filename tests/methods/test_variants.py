"""Variants of averaging and of mixtures: what each trains, on which text, and what it shares."""

from typing import Any

import pytest
import torch
from turns import nth

from coterie.adapters import of_roles
from coterie.data.windows import sample_batch
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss
from coterie.testing.rounds import down, joined, one_round


def trained(run, monkeypatch) -> list[tuple[str, frozenset[str], str]]:
    """Level, roles that have a gradient, and the text of every update of a client's first round."""
    local = joined(run)
    client: Any = local.clients["poet"]
    data = {"train": client.context.data.train, "validation": client.context.data.validation}
    seen = []
    monkeypatch.setattr(
        "coterie.training.local.sample_batch",
        lambda tokens, *rest: (
            seen.append(next(n for n, t in data.items() if t is tokens))
            or sample_batch(tokens, *rest)
        ),
    )
    found = []
    update = client.training._update

    def watched(model, level, step, turn) -> None:
        update(model, level, step, turn)
        roles = {part.role for part in client.parameters().values() if part.tensor.requires_grad}
        found.append((level.name, frozenset(roles), seen[-1]))

    client.training._update = watched
    local.open(local.config.turn(0), ["poet"])
    client.receive(down(local, "poet"))
    client.train(nth(0))
    return found


EXPERTS = {"pfedmoe": {"generalist", "specialist"}, "fedavg-moe": {"generalist"}}
EXPERTS["local-moe"] = {"specialist"}


@pytest.mark.parametrize("name", EXPERTS)
def test_without_levels_routers_learn_with_the_experts(config, monkeypatch, name) -> None:
    updates = trained(config(method=name), monkeypatch)
    everything = frozenset({"dense", "router"} | EXPERTS[name])
    assert updates == [("joint", everything, "train")] * 2


TR = {"comigs-tr": {"generalist", "specialist"}, "fedavg-moe-tr": {"generalist"}}
TR["local-moe-tr"] = {"specialist"}


@pytest.mark.parametrize("name", TR)
def test_tr_routers_learn_apart_from_fresh_training_batches(config, monkeypatch, name) -> None:
    run = config(method={"name": name, "router": {"every": 2, "steps": 3}})
    updates = trained(run, monkeypatch)
    experts = ("experts", frozenset({"dense"} | TR[name]), "train")
    assert updates == [experts] * 2 + [("routers", frozenset({"router"}), "train")] * 3


def updates_with(config, name: str, weight: float, top_k: int = 1) -> dict[str, Any]:
    """The first gradients of every level of a client with three experts: by level and name."""
    router = {"top_k": top_k, "load_balance_weight": weight}
    method = {"name": name, "mlp": {"generalists": 1, "specialists": 2}, "router": router}
    client: Any = joined(config(method=method)).clients["poet"]
    model, found = client.model(), {}
    for level in client.training.levels:
        client.adapter.require_grad(level.selects)
        trained = client.adapter.tensors(level.selects)
        loss = language_model_loss(model, torch.arange(36).view(2, -1))
        total = loss if level.penalty is None else loss + level.penalty()
        gradients = torch.autograd.grad(total, list(trained.values()))
        found[level.name] = dict(zip(trained, gradients, strict=True))
    return found


def test_the_load_balance_stands_in_both_levels(config) -> None:
    """CoMiGS, equation 2: the experts' loss has the term, too."""
    without, with_it = (updates_with(config, "comigs-1g1s", weight, 2) for weight in (0.0, 1.0))
    for level in ("experts", "routers"):
        changed = [n for n, g in with_it[level].items() if not torch.equal(g, without[level][n])]
        assert changed, level


@pytest.mark.parametrize("name", ["comigs-1g1s", "pfedmoe"])
def test_one_expert_per_token_teaches_the_router(config, name) -> None:
    for gradients in updates_with(config, name, weight=0.0).values():
        routers = [g for n, g in gradients.items() if n.startswith("router/")]
        assert all(g.abs().max() > 0 for g in routers)


@pytest.mark.slow
def test_what_mixtures_share(config) -> None:
    for name, roles in (
        ("pfedmoe", {"dense", "generalist"}),
        ("fedavg-moe", {"dense", "generalist"}),
        ("local-moe", set()),
        ("comigs-tr", {"dense", "generalist"}),
        ("local-moe-tr", set()),
    ):
        local = joined(config(method=name))
        upload = one_round(local, 0)["poet"]
        parts = local.clients["poet"].parameters()
        assert {parts[n].role for n in upload["adapter"]} == roles
        assert upload.groups.keys() == ({"adapter"} if roles else set())


def test_ffa_lora_trains_b_alone_on_the_same_a(config) -> None:
    local: Any = joined(config(method="ffa-lora", rounds=1))
    poet = local.clients["poet"].adapter
    first = {name: tensor.clone() for name, tensor in poet.tensors(of_roles("frozen")).items()}
    assert {poet.parameters()[name].factor for name in first} == {"A"}
    uploads = one_round(local, 0)
    for client in local.clients.values():
        frozen = client.adapter.tensors(of_roles("frozen"))
        assert frozen.keys() == first.keys()
        assert all(torch.equal(frozen[name], first[name]) for name in first)
        assert len(first) == len(client.adapter.tensors(of_roles("dense", "generalist")))
    parts = poet.parameters()
    assert {parts[name].factor for name in uploads["poet"]["adapter"]} == {"B"}
    # The mean of B is then the mean of the products, exactly.
    frozen = {parts[name].path: tensor.double() for name, tensor in first.items()}
    assert len(frozen) == len(first)
    for name in uploads["poet"]["adapter"]:
        A = frozen[parts[name].path]
        products = [u["adapter"][name].double() @ A for u in uploads.values()]
        mean = torch.stack(products).mean(0)
        assert torch.allclose(local.value.adapter[name].double() @ A, mean, atol=1e-8)


def test_fedprox_adds_the_gradient_of_half_mu_times_the_squared_distance(config) -> None:
    local = joined(config(method={"name": "fedprox", "mu": 0.3}))
    client: Any = local.clients["poet"]
    client.training.run(0)
    (level,) = client.training.levels
    start = client.training.start
    parameters = client.adapter.tensors()
    assert any(not torch.equal(start[n], p) for n, p in parameters.items())
    penalty = level.penalty()
    distances = [((p - start[n]) ** 2).sum() for n, p in parameters.items()]
    expected = 0.15 * torch.stack(distances).sum()
    assert torch.allclose(penalty, expected)
    penalty.backward()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter.grad, 0.3 * (parameter - start[name]).detach(), atol=1e-7)


@pytest.mark.slow
def test_fedprox_without_mu_is_fedavg(config) -> None:
    near = one_round(joined(config(method={"name": "fedprox", "mu": 0.0})), 0)["poet"]
    plain = one_round(joined(config(method="fedavg")), 0)["poet"]
    assert near.encode() == plain.encode()


def test_after_fine_tuning_the_model_is_the_trained_one(config) -> None:
    local: Any = joined(config(method="fedavg-ft", rounds=1))
    assert local.config.method.reports == "trained"
    one_round(local, 0)
    poet, whaler = (local.clients[n].adapter.tensors() for n in ("poet", "whaler"))
    assert any(not torch.equal(poet[n], whaler[n]) for n in poet)
    loss = language_model_loss(local.clients["poet"].model(), torch.arange(18).view(1, -1))
    assert torch.isfinite(loss)


@pytest.mark.slow
def test_unequal_and_missing_ranks_are_refused_with_a_sentence(config) -> None:
    for name, rank, sentence in (
        ("fedavg", {"poet": 4, "others": 8}, "needs the same rank"),
        ("local", {"poet": 4, "whaler": 8}, "mlp.rank has no value for the client 'diarist'"),
        ("local", {"pole": 4, "others": 8}, "mlp.rank names 'pole', which is not"),
        ("local", {"poet": 0, "others": 8}, "rank"),
    ):
        run = config(method={"name": name, "mlp": {"rank": rank}})
        with pytest.raises(CoterieError, match=sentence):
            Session(run).check(run)
    alone = config(method={"name": "local", "mlp": {"rank": {"poet": 4, "others": 8}}})
    Session(alone).check(alone)

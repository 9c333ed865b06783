"""Variants of averaging and of mixtures: what each trains, on which text, and what it shares."""

from typing import Any

import pytest
import torch
from naive_lora import ONE_STEP, record
from tensors import close_to, equal, mean_of
from turns import nth

from coterie.adapters import of_roles
from coterie.data.windows import sample_batch
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.losses.tokens import language_model_loss
from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round


def trained(run, monkeypatch) -> list[tuple[str, frozenset[str], str]]:
    """Return level, changed roles and text of every update in a client's first round."""
    local = joined(run)
    client: Any = local.clients["poet"]
    data, tensors = client.context.data, client.adapter.tensors()
    texts = {id(data.train): "train", id(data.validation): "validation"}
    seen, updates, update = [], [], client.training._update

    def sample(tokens, *rest):
        seen.append(texts[id(tokens)])
        return sample_batch(tokens, *rest)

    def watched(model, level, step, turn) -> None:
        before = copied(tensors)
        update(model, level, step, turn)
        assert all(parameter.grad is None for parameter in tensors.values())
        moved = [n for n, tensor in tensors.items() if not torch.equal(tensor, before[n])]
        roles = frozenset(client.parameters()[name].role for name in moved)
        updates.append((level.name, roles, seen[-1]))

    monkeypatch.setattr("coterie.training.local.sample_batch", sample)
    client.training._update = watched
    local.open(local.config.turn(0), ["poet"])
    client.receive(down(local, "poet"))
    client.train(nth(0))
    return updates


EXPERTS = {
    "pfedmoe": {"generalist", "specialist"},
    "fedavg-moe": {"generalist"},
    "local-moe": {"specialist"},
    "comigs-tr": {"generalist", "specialist"},
    "fedavg-moe-tr": {"generalist"},
    "local-moe-tr": {"specialist"},
    "comigs-1g1s": {"generalist", "specialist"},
}


@pytest.mark.parametrize("name", EXPERTS)
def test_routers_learn_with_the_experts_or_apart(config, monkeypatch, name) -> None:
    # Routers of CoMiGS learn from validation text, and those of -tr from new training batches.
    trains = frozenset({"dense"} | EXPERTS[name])
    if name in ("pfedmoe", "fedavg-moe", "local-moe"):
        expected, router = [("joint", trains | {"router"}, "train")] * 2, {}
    else:
        text, router = "train" if name.endswith("-tr") else "validation", {"every": 2, "steps": 3}
        expected = [("experts", trains, "train")] * 2
        expected += [("routers", frozenset({"router"}), text)] * 3
    method = {"name": name, **({"router": router} if router else {})}
    assert trained(config(method=method), monkeypatch) == expected


def updates_with(config, name: str, weight: float, top_k: int = 1) -> dict[str, Any]:
    """Return the first gradients of a client with three experts, by level and name."""
    router = {"top_k": top_k, "load_balance_weight": weight}
    method = {"name": name, "mlp": {"generalists": 1, "specialists": 2}, "router": router}
    client: Any = joined(config(method=method)).clients["poet"]
    model, updates = client.model(), {}
    for level in client.training.levels:
        client.adapter.require_grad(level.selects)
        trained = client.adapter.tensors(level.selects)
        loss = language_model_loss(model, torch.arange(36).view(2, -1))
        total = loss if level.penalty is None else loss + level.penalty()
        gradients = torch.autograd.grad(total, list(trained.values()))
        updates[level.name] = dict(zip(trained, gradients, strict=True))
    return updates


def test_the_load_balance_stands_in_both_levels(config) -> None:
    # CoMiGS, equation 2: the experts' loss has the term, too.
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
@pytest.mark.parametrize("name", EXPERTS)
def test_what_mixtures_share(config, name) -> None:
    local = joined(config(method=name))
    upload = one_round(local, 0)["poet"]
    parts = local.clients["poet"].parameters()
    roles = {"dense", "generalist"} if "generalist" in EXPERTS[name] else set()
    assert {parts[n].role for n in upload["adapter"]} == roles
    assert upload.groups.keys() == ({"adapter"} if roles else set())


def test_ffa_lora_trains_b_alone_on_the_same_a(config) -> None:
    local: Any = joined(config(method="ffa-lora", rounds=1))
    poet = local.clients["poet"].adapter
    first = copied(poet.tensors(of_roles("frozen")))
    assert {poet.parameters()[name].factor for name in first} == {"A"}
    uploads = one_round(local, 0)
    for client in local.clients.values():
        assert equal(client.adapter.tensors(of_roles("frozen")), first)
        assert len(first) == len(client.adapter.tensors(of_roles("dense", "generalist")))
    parts = poet.parameters()
    assert {parts[name].factor for name in uploads["poet"]["adapter"]} == {"B"}
    # The mean of B is then the mean of the products, exactly.
    frozen = {parts[name].path: tensor.double() for name, tensor in first.items()}
    assert len(frozen) == len(first)
    sent = [u["adapter"] for u in uploads.values()]
    products = [{n: B.double() @ frozen[parts[n].path] for n, B in u.items()} for u in sent]
    mean = {n: local.value.adapter[n].double() @ frozen[parts[n].path] for n in sent[0]}
    assert close_to(mean, mean_of(products), atol=1e-8)


def test_fedprox_pulls_towards_the_values_at_the_start_of_the_round(config) -> None:
    # With gradient descent, mu (w - w_t) is the gradient of mu / 2 ||w - w_t||^2.
    training = {**ONE_STEP, "steps": 3}
    local = joined(config(method={"name": "fedprox", "mu": 0.3}, rounds=2, training=training))
    client: Any = local.clients["poet"]
    for exchange in range(2):
        start = copied(client.adapter.tensors())
        steps = record(client.training, client.adapter.tensors())
        client.training.run(exchange)
        moved = [w for w, _ in steps[1:]] + [client.adapter.tensors()]
        for (w, gradient), after in zip(steps, moved, strict=True):
            stepped = {n: w[n] - 0.1 * gradient[n] for n in w}
            expected = {n: x - 0.1 * 0.3 * (x - start[n]) for n, x in stepped.items()}
            assert close_to(after, expected, atol=1e-7)
            assert not close_to(stepped, expected, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rank", "sentence"),
    [
        ("fedavg", {"poet": 4, "others": 8}, "needs the same rank"),
        ("local", {"poet": 4, "whaler": 8}, "mlp.rank has no value for the client 'diarist'"),
        ("flexlora", {"poet": 3}, "no value for the client 'diarist'"),
        ("hetlora", {"poet": 3}, "no value for the client 'diarist'"),
        ("local", {"pole": 4, "others": 8}, "mlp.rank names 'pole', which is not"),
        ("local", {"poet": 0, "others": 8}, "rank"),
    ],
)
def test_unequal_and_missing_ranks_are_refused_with_a_sentence(name, rank, sentence, config):
    run = config(method={"name": name, "mlp": {"rank": rank}})
    with pytest.raises(CoterieError, match=sentence):
        Session(run).check(run)


def test_clients_that_train_alone_may_have_any_rank(config) -> None:
    alone = config(method={"name": "local", "mlp": {"rank": {"poet": 4, "others": 8}}})
    Session(alone).check(alone)

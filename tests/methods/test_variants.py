"""Variants of averaging and of mixtures: what each trains, on which text, and what it shares."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.data import sample_batch
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.errors import CoterieError
from coterie.runs import RunFolder, Watch
from coterie.training.loss import language_model_loss


def sides(run) -> Any:
    session = Session(run)
    session.check(run)
    return LocalRun(run, session.base, session.participants(run), RunFolder(Path()), Watch())


def one_round(local: Any) -> dict:
    local.server.open(0, sorted(local.clients))
    uploads = {n: c.step(local.server.download(n)) for n, c in sorted(local.clients.items())}
    for name, upload in uploads.items():
        local.server.receive(name, upload)
    local.server.close()
    return uploads


def trained(run, monkeypatch) -> list[tuple[str, frozenset[str], str]]:
    """Level, roles that have a gradient, and the text of every update of a client's first round."""
    local = sides(run)
    client = local.clients["poet"]
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
        roles = {
            client.adapter.roles[n]
            for n, p in client.adapter.parameters().items()
            if p.requires_grad
        }
        found.append((level.name, frozenset(roles), seen[-1]))

    client.training._update = watched
    local.server.open(0, ["poet"])
    client.step(local.server.download("poet"))
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
    run = config(method={"name": name, "router_every": 2, "router_steps": 3})
    updates = trained(run, monkeypatch)
    experts = ("experts", frozenset({"dense"} | TR[name]), "train")
    assert updates == [experts] * 2 + [("routers", frozenset({"router"}), "train")] * 3


def test_what_mixtures_share(config) -> None:
    for name, roles in (
        ("pfedmoe", {"dense", "generalist"}),
        ("fedavg-moe", {"dense", "generalist"}),
        ("local-moe", set()),
        ("comigs-tr", {"dense", "generalist"}),
        ("local-moe-tr", set()),
    ):
        upload = one_round(sides(config(method=name)))["poet"]
        assert {n.split("/")[0].split(".")[0] for n in upload.tensors} == roles


def test_ffa_lora_trains_b_alone_on_the_same_a(config) -> None:
    local = sides(config(method="ffa-lora", rounds=1))
    before = {n: c.adapter.parameters("frozen") for n, c in local.clients.items()}
    first = {name: tensor.clone() for name, tensor in before["poet"].items()}
    assert all(name.endswith(".A") for name in first)
    uploads = one_round(local)
    for client in local.clients.values():
        frozen = client.adapter.parameters("frozen")
        assert all(torch.equal(frozen[name], first[name]) for name in first)
        assert len(first) == len(client.adapter.parameters("dense", "generalist"))
    assert all(name.endswith(".B") for name in uploads["poet"].tensors)
    # The mean of B is then the mean of the products, exactly.
    for name in uploads["poet"].tensors:
        A = first[f"frozen/{name.removesuffix('.B')}.A"].double()
        products = torch.stack([u.tensors[name].double() @ A for u in uploads.values()]).mean(0)
        assert torch.allclose(local.server.shared[name].double() @ A, products, atol=1e-8)


def test_fedprox_adds_the_gradient_of_half_mu_times_the_squared_distance(config) -> None:
    local = sides(config(method={"name": "fedprox", "mu": 0.3}))
    client = local.clients["poet"]
    client.training.round(0)
    (level,) = client.training.levels
    start = client.training._start
    parameters = client.adapter.parameters()
    assert any(not torch.equal(start[n], p) for n, p in parameters.items())
    penalty = level.penalty(start)
    distances = [((p - start[n]) ** 2).sum() for n, p in parameters.items()]
    expected = 0.15 * torch.stack(distances).sum()
    assert torch.allclose(penalty, expected)
    penalty.backward()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter.grad, 0.3 * (parameter - start[name]).detach(), atol=1e-7)


def test_fedprox_without_mu_is_fedavg(config) -> None:
    near = one_round(sides(config(method={"name": "fedprox", "mu": 0.0})))["poet"]
    plain = one_round(sides(config(method="fedavg")))["poet"]
    assert near.encode() == plain.encode()


def test_after_fine_tuning_the_model_is_the_trained_one(config) -> None:
    local = sides(config(method="fedavg-ft", rounds=1))
    assert local.config.method.reports == "trained"
    one_round(local)
    poet, whaler = (local.clients[n].adapter.parameters() for n in ("poet", "whaler"))
    assert any(not torch.equal(poet[n], whaler[n]) for n in poet)
    loss = language_model_loss(local.clients["poet"].model(), torch.arange(18).view(1, -1))
    assert torch.isfinite(loss)


def test_unequal_and_missing_ranks_are_refused_with_a_sentence(config) -> None:
    for method, sentence in (
        ({"name": "fedavg", "rank": {"poet": 4, "others": 8}}, "needs the same rank"),
        ({"name": "local", "rank": {"poet": 4, "whaler": 8}}, "no rank for the client 'diarist'"),
        ({"name": "local", "rank": {"pole": 4, "others": 8}}, "names 'pole', which is not"),
        ({"name": "local", "rank": {"poet": 0, "others": 8}}, "rank"),
    ):
        run = config(method=method)
        with pytest.raises(CoterieError, match=sentence):
            Session(run).check(run)
    alone = config(method={"name": "local", "rank": {"poet": 4, "others": 8}})
    Session(alone).check(alone)

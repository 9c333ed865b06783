"""PCL: who exchanges what and when, and that clients mix as the paper says."""

import math
from typing import Any

import pytest
import torch
from tensors import close_to, equal, mean_of
from turns import nth

import coterie
from coterie.config.run import parse
from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.evaluation.evaluate import top_logits
from coterie.losses.tokens import language_model_loss
from coterie.methods.pcl.trust import sparse_distance, trust_row
from coterie.methods.tensors import copied, copy
from coterie.runs import RunFolder
from coterie.seeding import generator
from coterie.testing.rounds import down, joined, one_round, take

NAMES = ("diarist", "poet", "whaler")


def started(run, rounds: int) -> Any:
    """Return a run after some rounds, with the downloads of the next round."""
    local = joined(run)
    for round in range(rounds):
        one_round(local, round)
    return local


def adapter(client) -> dict[str, torch.Tensor]:
    return copied(client.adapter.tensors())


def test_exchanges_come_after_the_warm_up_and_then_every_so_many_rounds(config, tmp_path) -> None:
    run = config(method={"name": "pcl-1", "warmup": 2, "every": 3}, rounds=6)
    coterie.run(run, out=tmp_path / "run")
    lines = [x for x in RunFolder(tmp_path / "run").metrics() if x["client"] == "poet"]
    sizes = [line for line in lines if line["name"] == "bytes/up"]
    assert [line["round"] for line in sizes if line["value"] > 1000] == [1, 4]
    rows = [line for line in lines if line["name"] == "trust"]
    assert [line["round"] for line in rows] == [2, 5]
    for line in rows:
        assert sorted(line["value"]) == list(NAMES)
        assert sum(line["value"].values()) == pytest.approx(1)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_clients_mix_updates_or_weights_by_their_row(config, form) -> None:
    shares = {"diarist": {"x": 1.0}, "poet": {"x": 0.25, "y": 0.75}, "whaler": {"y": 1.0}}
    method = {"name": "pcl-theoretical", "form": form, "warmup": 1, "every": 1, "mixtures": shares}
    local = started(config(method=method), 1)
    first = {n: adapter(c) for n, c in started(config(method=method), 0).clients.items()}
    trained = {name: adapter(client) for name, client in local.clients.items()}
    zero = {n: torch.zeros_like(t) for n, t in first["poet"].items()}
    start = {name: zero if form == "released" else first[name] for name in NAMES}
    moves = [{n: t - start[p][n] for n, t in trained[p].items()} for p in NAMES]
    for name, client in local.clients.items():
        client.receive(down(local, name))
        row = [sum(shares[name][t] * shares[p].get(t, 0) for t in shares[name]) for p in NAMES]
        expected = {n: start[name][n] + t for n, t in mean_of(moves, row).items()}
        assert close_to(adapter(client), expected)
    # The second time, the updates count from the mixture, which training leaves as it is.
    poet, name = local.clients["poet"], "dense/transformer.h.0.attn.c_attn.B"
    mixed = adapter(poet)[name]
    poet.train(nth(1))
    assert torch.equal(poet.buffers["start"][name], mixed)
    assert not torch.equal(adapter(poet)[name], mixed)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_validation_trust_is_the_softmax_of_minus_the_losses(config, form) -> None:
    method = {"name": "pcl-2", "form": form, "warmup": 1, "every": 1, "validation_batches": 2}
    run = config(method=method)
    local = started(run, 1)
    trained = {name: adapter(client) for name, client in local.clients.items()}
    poet = local.clients["poet"]
    seen = {}
    poet.context = poet.context.__class__(
        **{**poet.context.__dict__, "log": lambda name, value: seen.update({name: value})}
    )
    ids = sample_batch(poet.context.data.validation, 4, 16, generator(0, "trust", "poet", 1)).ids
    scores, model = [], poet.model()
    for name in NAMES:
        copy(trained[name], poet.adapter.tensors())
        loss = language_model_loss(model, ids).item()
        scores.append(-loss if form == "paper" else -math.exp(loss))
    copy(trained["poet"], poet.adapter.tensors())
    poet.receive(down(local, "poet"))
    expected = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    assert list(seen["trust"].values()) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_prediction_trust_compares_everybody_on_the_same_public_windows(values) -> None:
    # The distance of predictions is compared with dense logits in test_trust.py.
    whole = values(method={"name": "pcl-3", "warmup": 1, "every": 1, "logits": 5})
    local = started(parse({**whole, "data": {**whole["data"], "public": "poet.txt"}}), 1)
    predictions = {}
    for name, client in local.clients.items():
        batch: Any = sample_batch(client.context.public, 8, 16, generator(0, "public", 1))
        client.model()
        logits, places = top_logits(client.context.base, batch, 5, at_once=3)
        best = client.context.base.model(batch.ids[:, :-1]).logits[:, -1].topk(5)
        assert torch.allclose(logits.sort(descending=True).values, best.values, atol=1e-4)
        predictions[name] = logits.half().float(), places
    scores = {n: -sparse_distance(predictions["poet"], predictions[n]) for n in NAMES}
    poet = local.clients["poet"]
    download = down(local, "poet")
    uploads = {"poet": poet.upload(nth(0))} | {n: download.from_peer(n) for n in download.peers}
    row = poet.method.row(poet, 1, {name: uploads[name] for name in NAMES})
    assert row == pytest.approx(trust_row("poet", scores), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "form", "groups"),
    [
        ("pcl-1", "paper", {"adapter", "update"}),
        ("pcl-1", "released", {"adapter"}),
        ("pcl-uniform", "paper", {"update"}),
        ("pcl-uniform", "released", {"adapter"}),
    ],
)
def test_weights_travel_where_they_are_compared_or_mixed(config, name, form, groups) -> None:
    # Table 1 of the paper: only scores of the weights themselves need weights beside the updates.
    local = joined(config(method={"name": name, "form": form, "warmup": 1, "every": 1}))
    assert {frozenset(u.groups) for u in one_round(local, 0).values()} == {frozenset(groups)}


@pytest.mark.parametrize("form", ["paper", "released"])
def test_the_released_form_draws_each_clients_a_apart(config, form) -> None:
    clients = joined(config(method={"name": "pcl-uniform", "form": form})).clients
    poet, whaler = (clients[name] for name in ("poet", "whaler"))
    others = adapter(whaler)
    for name, tensor in adapter(poet).items():
        apart = form == "released" and poet.parameters()[name].factor == "A"
        assert torch.equal(tensor, others[name]) != apart


def test_uniform_trust_as_released_is_federated_averaging_after_a_warm_up(config) -> None:
    method = {"name": "pcl-uniform", "form": "released", "warmup": 2, "every": 1}
    local = joined(config(method=method))
    assert not any(upload.groups for upload in one_round(local, 0).values())
    one_round(local, 1)
    uploads = one_round(local, 2)
    take(local)
    assert close_to(adapter(local.clients["poet"]), mean_of(u["adapter"] for u in uploads.values()))


def test_trust_can_be_measured_without_mixing(config, tmp_path) -> None:
    method = {"name": "pcl-2", "warmup": 1, "every": 1, "validation_batches": 1, "mix": False}
    measured = coterie.run(config(method=method), out=tmp_path / "measured")
    folder = RunFolder(measured.path)
    assert sum(line["name"] == "trust" for line in folder.metrics()) == 9
    adapter = folder.load("client-poet")["adapter"]
    never = {**method, "warmup": 100}
    other = coterie.run(config(method=never), out=tmp_path / "never")
    plain = RunFolder(other.path).load("client-poet")["adapter"]
    assert equal(adapter, plain)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("pcl-3", {}, "public set"),
        ("pcl-theoretical", {"mixtures": {"poet": {"x": 1.0}}}, "add diarist, whaler to its setti"),
        ("pcl-theoretical", {"mixtures": {"poet": {"x": 0.5, "y": 0.4}}}, r"sum to 0\.9"),
        ("pcl-1", {"trusted": {"top": 2, "threshold": 0.5}}, "are mutually exclusive"),
    ],
)
def test_what_is_missing_is_said(name, settings, sentence, config) -> None:
    with pytest.raises(CoterieError, match=sentence):
        joined(config(method={"name": name, **settings}))

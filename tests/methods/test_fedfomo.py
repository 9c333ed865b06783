"""FedFomo: combinations equal the paper's equations, and affinities select the peers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from naive_losses import loss_of
from tensors import close_to, equal

from coterie.messages import Message, MessageError
from coterie.messages.names import TRUST
from coterie.methods.tensors import copied, copy
from coterie.testing.rounds import down, joined, one_round, step, up

NAMES = ("diarist", "poet", "whaler")


def run_of(config, clients: tuple[str, ...] = NAMES, **method: Any) -> Any:
    sources = [{"name": name, "path": f"{name}.txt"} for name in clients]
    training = {"steps": 4, "batch": 8, "precision": "fp32", "learning_rate": 0.005}
    method = {"name": "fedfomo", **method}
    return joined(config(method=method, rounds=4, training=training, clients=sources))


def combination(local: Any, name: str, start: Any, adapters: Any) -> tuple[Any, Any, Any]:
    """Return p + sum_n w_n (x_n - p), the weights w_n, and the scores s_n."""
    loss, scores = loss_of(local, name, start), {}
    for other, x in adapters.items():
        change = np.concatenate([(x[n] - start[n]).numpy().ravel() for n in start])
        gain, distance = loss - loss_of(local, name, x), np.linalg.norm(change)
        scores[other] = gain / distance if distance else 0.0
    positive = {other: max(0.0, score) for other, score in scores.items()}
    weights = {other: s / (sum(positive.values()) or 1) for other, s in positive.items()}
    combined = dict(start)
    for other, x in adapters.items():
        combined = {n: t + weights[other] * (x[n] - start[n]) for n, t in combined.items()}
    return combined, weights, scores


@pytest.mark.parametrize("baseline", ["before", "after"])
def test_a_client_combines_adapters_as_in_the_paper(baseline, config) -> None:
    local = run_of(config, baseline=baseline)
    initial = copied(local.clients["poet"].shared)
    adapters = {name: upload["adapter"] for name, upload in one_round(local, 0).items()}
    local.open(local.config.turn(1), NAMES)
    client, logged = local.clients["poet"], {}
    client.context = replace(client.context, log=logged.__setitem__)
    if baseline == "after":  # the last training had no effect
        copy(client.shared, client.buffers["before"])
        copy(initial, client.shared)
        adapters["poet"] = initial
    combined, weights, scores = combination(local, "poet", initial, adapters)
    client.receive(down(local, "poet"))
    assert close_to(client.shared, combined)
    assert logged[TRUST] == pytest.approx(weights, abs=1e-4)
    assert sum(weights.values()) == pytest.approx(1)
    assert len({weight for weight in weights.values() if weight}) > 1
    client.train(local.config.turn(1))
    assert close_to(client.buffers["before"], combined)
    total = sum(map(abs, scores.values()))
    expected = {name: scores[name] / total for name in ("diarist", "whaler")}
    assert up(local, "poet", 1).values["scores"] == pytest.approx(expected, abs=1e-4)


def test_without_a_better_adapter_a_client_keeps_the_baseline(config) -> None:
    local = run_of(config)
    client, initial = local.clients["poet"], copied(local.clients["poet"].shared)
    one_round(local, 0)
    trained = copied(client.shared)
    assert loss_of(local, "poet", trained) < loss_of(local, "poet", initial)
    copy(trained, client.buffers["before"])
    copy(initial, client.shared)
    client.receive(Message(1, peers={"whaler": {"adapter": initial}}))
    assert equal(client.shared, trained)
    assert client.scores == {"whaler": -0.5}  # both differences are equal


@pytest.mark.parametrize("clients", [("poet",), ("diarist", "poet")])
def test_few_clients_learn_together(clients, config) -> None:
    local = run_of(config, clients, peers=1)
    uploads = [one_round(local, turn) for turn in range(3)][-1]
    others = [name for name in clients if name != "poet"]
    assert list(uploads["poet"].values["scores"]) == others == list(down(local, "poet").peers)


def test_the_server_sends_the_adapters_that_helped_most(config) -> None:
    local = run_of(config, peers=1, epsilon=0.0)
    one_round(local, 0)
    first = {step_peers(local, turn) for turn in range(20)}
    assert first == {("diarist",), ("whaler",)}  # equal affinities
    local.open(local.config.turn(1), NAMES)
    upload = step(local, "poet", 1)
    for scores in ({"whaler": 0.25, "stranger": 1.0}, {"whaler": -0.125}):
        replaced = Message(1, upload.groups, {"scores": scores})
        local.exchange.begin()
        local.take("poet", replaced.encode())
        local.exchange.settle()
        local.value = local.server.aggregate(local.value, local.exchange)
    assert local.value.affinities["poet"] == {"whaler": 0.125}
    assert {step_peers(local, turn) for turn in range(20)} == {("whaler",)}
    local.leave("whaler")
    assert step_peers(local, 2) == ("diarist",)
    assert not local.value.affinities["poet"]


def test_random_adapters_become_rare(config) -> None:
    local = run_of(config, peers=1, epsilon=1.0, decay=0.02)
    one_round(local, 0)
    local.value = type(local.value)(
        held=local.value.held,
        uploads=local.value.uploads,
        affinities={"poet": {"whaler": 1.0}},
    )
    early = [step_peers(local, turn) for turn in range(25)]
    assert early.count(("diarist",)) > 2
    assert {step_peers(local, turn) for turn in range(50, 70)} == {("whaler",)}


def step_peers(local: Any, turn: int) -> tuple[str, ...]:
    """Return whose adapters the poet receives in an exchange."""
    local.exchange.open(local.config.turn(turn), NAMES)
    return tuple(local.server.peers(local.value, "poet", local.exchange))


@pytest.mark.parametrize("scores", [None, [], {"whaler": 2.0}, {"whaler": "1"}, {"whaler": True}])
def test_invalid_scores_are_refused(scores, config) -> None:
    local = run_of(config)
    local.open(local.config.turn(0), NAMES)
    upload = step(local, "poet", 0)
    values = {} if scores is None else {"scores": scores}
    with pytest.raises(MessageError, match="no valid scores"):
        local.server.check(local.value, "poet", Message(0, upload.groups, values), local.exchange)


def test_adapters_of_another_shape_are_refused(config) -> None:
    client = run_of(config).clients["poet"]
    before = copied(client.shared)
    wrong = {n: torch.cat([t, t]) for n, t in before.items()}
    with pytest.raises(MessageError, match="shape"):
        client.receive(Message(1, peers={"whaler": {"adapter": wrong}}))
    assert equal(client.shared, before)

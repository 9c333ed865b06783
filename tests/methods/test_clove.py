"""IFCA and CLoVE: losses, clusters and models equal naive versions."""

from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from naive_losses import loss_of
from tensors import close_to, equal, mean_of

from coterie.messages import Message, MessageError
from coterie.methods.clove import CLoVE
from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round, step, take

NAMES = ("diarist", "poet", "whaler")


def run_of(config, name: str, clients: tuple[str, ...] = NAMES, **method: Any) -> Any:
    sources = [{"name": client, "path": f"{client}.txt"} for client in clients]
    training = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.02}
    method = {"name": name, **method}
    return joined(config(method=method, rounds=4, training=training, clients=sources))


def means(local: Any, members: dict[str, int], uploads: dict[str, Any]) -> list[Any]:
    """Return the expected models, which are equal to the old ones where a cluster is empty."""
    models = []
    for number, old in enumerate(local.value.models):
        sent = [uploads[c]["adapter"] for c in uploads if members[c] == number]
        models.append(mean_of(sent) if sent else old)
    return models


@pytest.mark.parametrize("text", ["validation", "train"])
def test_a_client_of_ifca_joins_the_cluster_with_the_lowest_loss(text, config) -> None:
    local = run_of(config, "ifca", text=text, samples=200)
    before = local.value.models
    first = one_round(local, 0)
    members = {name: upload.values["cluster"] for name, upload in first.items()}
    assert set(members.values()) == {0, 1}  # all models are equal: clusters are random
    for number, model in enumerate(local.value.models):
        assert close_to(model, mean_of(first[c]["adapter"] for c in NAMES if members[c] == number))
    assert not any(equal(model, old) for model, old in zip(local.value.models, before, strict=True))
    losses = {c: [loss_of(local, c, m, text) for m in local.value.models] for c in NAMES}
    chosen = {c: int(np.argmin(losses[c])) for c in NAMES}
    local.open(local.config.turn(1), NAMES)
    for name, client in local.clients.items():
        client.receive(down(local, name))
        assert client.losses == pytest.approx(losses[name], abs=1e-4)
        assert equal(client.shared, local.value.models[chosen[name]])
    old = local.value
    uploads = one_round(local, 1)
    assert {name: upload.values["cluster"] for name, upload in uploads.items()} == chosen
    new, local.value = local.value, old
    for model, expected in zip(new.models, means(local, chosen, uploads), strict=True):
        assert close_to(model, expected)


def best(vectors: np.ndarray, clusters: int) -> tuple[float, list[int]]:
    """Return the partition with the smallest sum of squares within clusters, by trying all."""

    def spread(labels: tuple[int, ...]) -> float:
        groups = [vectors[[label == k for label in labels]] for k in set(labels)]
        return sum(((group - group.mean(0)) ** 2).sum() for group in groups)

    partitions = [p for p in product(range(clusters), repeat=len(vectors)) if len({*p}) == clusters]
    return min((spread(labels), list(labels)) for labels in partitions)


@pytest.mark.parametrize("seed", range(5))
def test_clove_clusters_losses_and_matches_models(seed) -> None:
    draw = np.random.default_rng(seed)
    centres = draw.uniform(1, 6, (3, 3))
    vectors = (centres[[0, 1, 2, 0, 1, 2]] + draw.normal(0, 0.05, (6, 3))).round(6)
    losses = {f"client {n}": row for n, row in enumerate(vectors.tolist())}
    _, labels = best(vectors, 3)
    cheapest = min(
        permutations(range(3)),
        key=lambda models: sum(vectors[i, models[label]] for i, label in enumerate(labels)),
    )
    expected = {client: cheapest[label] for client, label in zip(losses, labels, strict=True)}
    assert CLoVE(clusters=3).assigned(losses) == expected


def test_the_number_of_clusters_is_chosen() -> None:
    losses = {"a": [1.0, 3.0, 3.0, 4.0], "b": [1.1, 3.0, 3.1, 4.0], "c": [3.0, 2.0, 1.0, 4.0]}
    losses |= {"d": [3.0, 2.1, 1.0, 4.0]}
    chosen = CLoVE(clusters=4, choose=True).assigned(losses)
    assert chosen == {"a": 0, "b": 0, "c": 2, "d": 2}
    assert len(set(CLoVE(clusters=4).assigned(losses).values())) == 4
    two = {name: losses[name] for name in "ad"}
    assert len(set(CLoVE(clusters=4, choose=True).assigned(two).values())) == 1
    assert CLoVE(clusters=4).assigned({"c": losses["c"]}) == {"c": 2}


def test_a_round_of_clove_takes_two_exchanges(config) -> None:
    local = run_of(config, "clove")
    assert local.config.exchanges == 8
    start = copied(local.clients["poet"].shared)
    sent = one_round(local, 0)
    assert not any(upload.groups for upload in sent.values())
    assert equal(local.clients["poet"].shared, start)
    assert sorted(Counter(local.value.members.values()).values()) == [1, 2]
    uploads, members = one_round(local, 1), dict(local.value.members)
    for number, model in enumerate(local.value.models):
        assert close_to(
            model, mean_of(uploads[c]["adapter"] for c in NAMES if members[c] == number)
        )
    # From the second round on, clusters depend on the losses.
    models = local.value.models
    losses = {c: [loss_of(local, c, model) for model in models] for c in NAMES}
    take(local)
    assert all(equal(local.clients[c].shared, models[members[c]]) for c in NAMES)
    sent = one_round(local, 2)
    for name, upload in sent.items():
        assert upload.values["losses"] == pytest.approx(losses[name], abs=1e-4)
    chosen = local.server.method.assigned({c: u.values["losses"] for c, u in sent.items()})
    assert dict(local.value.members) == chosen
    local.open(local.config.turn(3), NAMES)
    for name, number in chosen.items():
        message = down(local, name)
        assert message.values["cluster"] == number
        assert message.groups.keys() == {f"cluster-{number}"}
        assert equal(message[f"cluster-{number}"], models[number])


@pytest.mark.parametrize("name", ["ifca", "clove"])
@pytest.mark.parametrize("clients", [("poet",), ("diarist", "poet")])
def test_few_clients_form_clusters(name, clients, config) -> None:
    local = run_of(config, name, clients, clusters=3)
    for turn in range(local.config.exchanges):
        one_round(local, turn)
    take(local)
    assert all(any(equal(c.shared, m) for m in local.value.models) for c in local.clients.values())


def test_a_client_without_losses_trains_in_a_random_cluster(config) -> None:
    local = run_of(config, "clove")
    one_round(local, 0, ["diarist", "whaler"])
    uploads = one_round(local, 1)
    number = local.clients["poet"].cluster
    assert "poet" not in local.value.members
    members = {**local.value.members, "poet": number}
    sent = [uploads[c]["adapter"] for c in NAMES if members[c] == number]
    assert close_to(local.value.models[number], mean_of(sent))
    one_round(local, 2, ["poet"])  # one client chooses the lowest loss
    losses = local.clients["poet"].losses
    assert local.value.members["poet"] == losses.index(min(losses))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clove", v) for v in (None, [], [1.0], [1.0, -1.0], [1.0, 1e9], [1.0, "1"], {"0": 1.0})),
        *(("ifca", v) for v in (None, 2, -1, 0.0, True, "0")),
    ],
)
def test_invalid_choices_are_refused(name, value, config) -> None:
    local = run_of(config, name)
    local.open(local.config.turn(0), NAMES)
    upload = step(local, "poet", 0)
    [key] = upload.values
    forged = replace(upload, values={} if value is None else {key: value})
    with pytest.raises(MessageError, match="valid cluster, or losses"):
        local.server.check(local.value, "poet", forged, local.exchange)
    client, before = local.clients["poet"], copied(local.clients["poet"].shared)
    with pytest.raises(MessageError):
        client.receive(replace(down(local, "poet"), values={"cluster": 2}))
    with pytest.raises(MessageError):
        client.receive(Message(0))
    assert equal(client.shared, before)

"""FedLEASE: routing, clusters and averages equal naive versions; late clients join a cluster."""

from typing import Any

import numpy as np
import pytest
import torch
from tensors import close_to, mean_of
from torch import Tensor

from coterie.adapters.layout import Layout
from coterie.adapters.lease import LeaseLinear
from coterie.adapters.lora import pairs_in
from coterie.methods.clusters import clusters, cosine_distances, silhouette
from coterie.methods.tensors import copied
from coterie.testing.rounds import down, joined, one_round, take

METHOD = {"name": "fedlease", "warmup": 1}


def test_routing_follows_the_slots_of_each_token() -> None:
    torch.manual_seed(0)
    base, own, M = torch.nn.Linear(6, 5), 1, 3
    layout = Layout(M, 0, 2, attention_rank=0, alpha=4.0, scale="rank", top_k=M)
    layer: Any = LeaseLinear(base, "q", layout, own)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 6)
    pairs = pairs_in(layer)
    assert len(layer.router) == 2 * M - 1
    counts = set()
    for token, output in zip(x.flatten(0, 1), layer(x).flatten(0, 1), strict=True):
        p = torch.softmax(layer.router @ token, 0)
        best = sorted(range(2 * M - 1), key=lambda s: -p[s].item())[:M]
        expected = base(token)
        for slot in best:
            expert = slot if slot < M else own
            share = p[slot] / sum(p[s] for s in best)
            expected = expected + share * 4.0 / 2 * pairs[expert].B @ pairs[expert].A @ token
        torch.testing.assert_close(output, expected)
        experts = {slot if slot < M else own for slot in best}
        assert own in experts
        counts.add(len(experts))
    assert len(counts) > 1  # adaptive: tokens use different numbers of experts
    torch.testing.assert_close(layer.routing().sum(), torch.tensor(1.0))


def naive(distances: np.ndarray, most: int) -> list[int]:
    """Merge the two nearest clusters until there are k, for every k; return the best labels."""
    n, best = len(distances), (-2.0, [0] * len(distances))
    for k in range(2, min(most, n - 1) + 1):
        groups = [[i] for i in range(n)]
        while len(groups) > k:
            pairs = [(a, b) for b in range(len(groups)) for a in range(b)]
            a, b = min(pairs, key=lambda p: distances[np.ix_(groups[p[0]], groups[p[1]])].mean())
            groups[a] += groups.pop(b)
        labels = [next(g for g, members in enumerate(groups) if i in members) for i in range(n)]
        best = max(best, (silhouette(distances, np.array(labels)), labels))
    return best[1]


@pytest.mark.parametrize("seed", range(5))
def test_clusters_equal_a_naive_version(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(9, 3)) + 4 * np.eye(3)[rng.integers(0, 3, 9)]
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    numbers = {label: n for n, label in enumerate(dict.fromkeys(naive(distances, 5)))}
    assert clusters(distances, 5) == [numbers[label] for label in naive(distances, 5)]


def test_the_silhouette_of_a_known_clustering() -> None:
    points = np.array([0.0, 1.0, 10.0])
    distances = np.abs(points[:, None] - points[None])
    expected = ((10 - 1) / 10 + (9 - 1) / 9 + 0) / 3  # a client alone in its cluster counts as 0
    assert silhouette(distances, np.array([1, 1, 2])) == pytest.approx(expected)
    assert clusters(distances, 4) == [0, 0, 1]
    assert clusters(distances[:2, :2], 4) == [0, 0]
    assert clusters(distances, 1) == [0, 0, 0]


def experts_of(client: Any, number: int | None) -> dict[str, Tensor]:
    parameters = client.parameters().values()
    return copied({f"{p.path} {p.factor}": p.tensor for p in parameters if p.expert == number})


def test_two_exchanges_follow_the_two_phases(config) -> None:
    local: Any = joined(config(method=METHOD, rounds=2))
    names = sorted(local.clients)
    start = experts_of(local.clients["poet"], 0)
    assert all(close_to(start, experts_of(c, 0)) for c in local.clients.values())
    one_round(local, 0)
    alone = {name: experts_of(local.clients[name], 0) for name in names}
    # Phase 1: d(i, j) is the mean of 1 - cos(B_i, B_j) over the layers.
    Bs = [{n: t for n, t in alone[name].items() if n.endswith(" B")} for name in names]
    labels = clusters(cosine_distances(Bs, Bs), 4)
    assert local.value.cluster == dict(zip(names, labels, strict=True))
    take(local)
    for client in local.clients.values():
        for number in (0, 1):
            members = [alone[n] for n, label in zip(names, labels, strict=True) if label == number]
            assert close_to(experts_of(client, number), mean_of(members))
    # Phase 2: a client trains its own expert and its router, which are averaged in the cluster.
    one_round(local, 1)
    cluster = local.value.cluster
    trained = {name: experts_of(local.clients[name], own) for name, own in cluster.items()}
    routers = {name: experts_of(local.clients[name], None) for name in names}
    for name, own in cluster.items():
        members = [n for n in names if cluster[n] == own]
        other = [alone[n] for n, label in zip(names, labels, strict=True) if label == 1 - own]
        assert close_to(experts_of(local.clients[name], 1 - own), mean_of(other))  # not trained
        local.clients[name].receive(down(local, name))
        client = local.clients[name]
        assert close_to(experts_of(client, own), mean_of([trained[n] for n in members]))
        assert close_to(experts_of(client, None), mean_of([routers[n] for n in members]))
        assert not close_to(routers[name], mean_of([*routers.values()]))


def test_a_client_that_comes_late_trains_alone_and_joins_the_nearest_cluster(config) -> None:
    local: Any = joined(config(method=METHOD, rounds=4))
    one_round(local, 0, ["diarist", "whaler"])
    assert local.value.cluster == {"diarist": 0, "whaler": 0}
    one_round(local, 1)
    assert local.value.cluster == {"diarist": 0, "poet": 0, "whaler": 0}
    take(local)
    poet, whaler = local.clients["poet"], local.clients["whaler"]
    assert close_to(experts_of(poet, 0), experts_of(whaler, 0))

"""Distances between clients' adapters, and clusters of clients (FedLEASE, arXiv 2509.15087)."""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor
from torch.nn import functional as F

from coterie.messages import Tensors
from coterie.methods.value import PerClient

FEW = 4
"""The number of adapters that are in memory while distances are computed."""


def cosine_distances(rows: Collection[Tensors], columns: Collection[Tensors]) -> np.ndarray:
    """Return the distances between adapters: 1 - cos, averaged over the tensors.

    Adapters in files are read several times, each time for a few tensors, so the memory hardly
    grows with their number.

    Args:
        rows: Adapters, each of which maps names to tensors.
        columns: Adapters with tensors of the same names.

    Returns:
        The distances, as an array shaped (rows, columns).
    """
    names = [*next(iter(rows))]
    count = max(1, FEW * len(names) // len(rows))
    blocks = (names[begin : begin + count] for begin in range(0, len(names), count))
    similarities = [tensor for block in blocks for tensor in _similarities(rows, columns, block)]
    return (1 - torch.stack(similarities).mean(0)).numpy()


def _similarities(
    rows: Collection[Tensors], columns: Collection[Tensors], names: Collection[str]
) -> list[Tensor]:
    """Return cos, shaped (rows, columns), for each of some tensors."""
    first = [{n: tensors[n] for n in names} for tensors in rows]
    second = first if columns is rows else [{n: t[n] for n in names} for t in columns]
    similarities: list[Tensor] = []
    for name in names:
        x, y = (
            F.normalize(torch.stack([t[name].flatten() for t in side]).double(), dim=1)
            for side in (first, second)
        )
        similarities.append(x @ y.t())
    return similarities


def nearest(adapters: Mapping[str, Tensors], start: Tensors, most: int) -> dict[str, list[str]]:
    """Return, for each client, the other clients whose changes are the nearest.

    Args:
        adapters: A mapping from clients to adapters with tensors of the same names.
        start: The values from which the changes are computed.
        most: The largest number of other clients for each client.

    Returns:
        The names of the other clients, in alphabetical order.
    """
    names = sorted(adapters)
    others = {name: [other for other in names if other != name] for name in names}
    if len(names) > most + 1:
        changes = PerClient(adapters).mapped(lambda t: {n: t[n] - start[n] for n in t})
        ordered = PerClient({name: changes.unread[name] for name in names}).values()
        for name, row in zip(names, cosine_distances(ordered, ordered).tolist(), strict=True):
            distances = dict(zip(names, row, strict=True))
            others[name] = sorted(sorted(others[name], key=distances.__getitem__)[:most])
    return others


def clusters(distances: np.ndarray, most: int) -> list[int]:
    """Divide clients into clusters by agglomerative clustering with average linkage.

    The number of clusters, from 2 to `most` and below n, has the highest mean silhouette. With
    fewer than three clients, or if `most` is 1, all clients are in one cluster.

    Args:
        distances: The distances between n clients, shaped (n, n).
        most: The largest number of clusters.

    Returns:
        The number of each client's cluster. Clusters are numbered by their first client, from 0.
    """
    best, labels = -np.inf, np.zeros(len(distances), dtype=int)
    if len(distances) > 2:
        tree = linkage(squareform(distances, checks=False), "average")
        for count in range(2, min(most, len(distances) - 1) + 1):
            candidate = fcluster(tree, count, "maxclust")
            if (score := silhouette(distances, candidate)) > best:
                best, labels = score, candidate
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels.tolist()))}
    return [numbers[label] for label in labels.tolist()]


def silhouette(distances: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean silhouette of a clustering.

    The silhouette of a client is (b - a) / max(a, b). Here a is the mean distance to the other
    clients of its cluster, and b is the lowest mean distance to the clients of another cluster. The
    silhouette of a client that is alone in its cluster is 0.

    Args:
        distances: The distances between n clients, shaped (n, n).
        labels: The cluster of each client, shaped (n,). There are at least two clusters.
    """
    scores = []
    for client, label in enumerate(labels):
        others = (labels == label) & (np.arange(len(labels)) != client)
        if not others.any() or (labels == label).all():
            scores.append(0.0)
            continue
        a = distances[client, others].mean()
        b = min(distances[client, labels == other].mean() for other in {*labels} - {label})
        scores.append((b - a) / max(a, b, 1e-300))
    return float(np.mean(scores))

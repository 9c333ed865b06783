"""Texts of given sizes and label shares, taken from the records of each label."""

from collections.abc import Mapping, Sequence

import numpy

from coterie.errors import CoterieError

Pools = dict[str, list[int]]
"""The indices of the records with each label, in shuffled order."""


def client_mixtures(
    mixtures: Mapping[str, Mapping[str, float]], pools: Pools
) -> list[Mapping[str, float]]:
    """Refuse labels without records, and return the clients' label shares, sorted by client."""
    for client, shares in sorted(mixtures.items()):
        for label in shares:
            if label not in pools:
                raise CoterieError(
                    f"divide: client {client} requests the label {label!r}, which no record has "
                    f"(labels: {', '.join(pools)}); correct divide.mixtures."
                )
    return [mixtures[client] for client in sorted(mixtures)]


Mixtures = Sequence[Mapping[str, float]]
"""The label shares of each client, as fractions of the characters or of the samples."""


def largest_size(pools: Pools, mixtures: Mixtures, lengths: list[int]) -> float:
    """Return the largest common size of clients' texts for which each label has enough records.

    The size of a text is the sum of its records' `lengths`, in which a sample counts as 1.
    """
    sizes: list[float] = []
    for label, pool in pools.items():
        if requested := sum(shares.get(label, 0) for shares in mixtures):
            sizes.append(sum(lengths[number] for number in pool) / requested)
    return min(sizes)


def take(pools: Pools, mixtures: Mixtures, lengths: list[int], size: float) -> list[list[int]]:
    """Take records with a total length of about `size` for each client, and return their indices.

    Because records are not divided, each label's share is exact only to within one record. A
    client's records alternate between labels. If a limit truncates the client's text, the remaining
    text therefore has the label shares of the whole text, to within one record per label.
    """
    parts: list[list[tuple[float, int]]] = [[] for _ in mixtures]
    for label, pool in pools.items():
        ends = numpy.cumsum([0, *(lengths[number] for number in pool)])
        start, target = 0, 0.0
        for part, shares in zip(parts, mixtures, strict=True):
            target += size * shares.get(label, 0)
            end = int(abs(ends - target).argmin())
            middles = (ends[start:end] + ends[start + 1 : end + 1]) / 2 - ends[start]
            places = middles / (ends[end] - ends[start])  # 0 to 1, within the label's text
            part += zip(places.tolist(), pool[start:end], strict=True)
            start = end
        del pool[:start]
    return [[number for _, number in sorted(part)] for part in parts]

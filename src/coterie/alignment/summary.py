"""Statistics of a vocabulary map, and its most distant pairs of tokens."""

from dataclasses import dataclass

import torch

from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary

LAST = 4
"""Smallest edit distance in the histogram's last bin, which also counts all larger distances."""


@dataclass(frozen=True)
class Summary:
    """Statistics of a vocabulary map over the source's tokens, except special and unused tokens."""

    tokens: int
    """Number of tokens of the source, without special and unused tokens."""
    exact: float
    """Share of `tokens`, from 0 to 1, that are identical to a token of the target."""
    mean: float
    """Mean edit distance in bytes over all mapped tokens."""
    histogram: tuple[int, ...]
    """Numbers of tokens whose edit distances in bytes are 0, 1, 2, 3, and at least 4."""


def summarise(source: Vocabulary, mapping: VocabularyMap) -> Summary:
    """Compute the statistics of a vocabulary map whose source vocabulary is `source`."""
    has_bytes = torch.tensor([token is not None for token in source.tokens], dtype=torch.bool)
    distances = mapping.distances[has_bytes].long()
    tokens = len(distances)
    distances = distances[distances >= 0]  # -1 if the target has no token with bytes
    counts = distances.clamp(max=LAST).bincount(minlength=LAST + 1).tolist()
    mean = int(distances.sum()) / max(len(distances), 1)
    return Summary(tokens, counts[0] / max(tokens, 1), mean, tuple(counts))


def worst(source: Vocabulary, mapping: VocabularyMap, most: int) -> list[int]:
    """Return the ids of the source tokens with the largest edit distances to their target tokens.

    The token with the largest distance comes first. At most `most` ids are returned. Tokens with
    the distance 0 are left out. Ties are resolved in favour of the smallest id.
    """
    ranked = [
        (-distance, i)
        for i, distance in enumerate(mapping.distances.tolist())
        if source.tokens[i] is not None and distance > 0
    ]
    return [i for _, i in sorted(ranked)[:most]]


def readable(token: bytes) -> str:
    """Format a token as quoted text, in which invalid bytes and control characters are escaped."""
    text = token.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f'"{"".join(escaped)}"'

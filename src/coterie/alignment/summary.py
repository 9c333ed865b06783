"""How near two vocabularies are: figures of a map, and its worst cases."""

from dataclasses import dataclass

import torch

from coterie.alignment.mapping import VocabularyMap
from coterie.alignment.vocabulary import Vocabulary

LAST = 4
"""Bytes edited that are counted together with more."""


@dataclass(frozen=True)
class Summary:
    """Figures of a map, over the source's tokens that have bytes."""

    tokens: int
    """So many."""
    exact: float
    """The share that the target has, too; 0 to 1."""
    mean: float
    """Bytes edited, on average over the tokens that are mapped."""
    histogram: tuple[int, ...]
    """Tokens by bytes edited: 0, 1, 2, 3, and 4 or more."""


def summarise(source: Vocabulary, found: VocabularyMap) -> Summary:
    """The figures of a map from `source`."""
    spelled = torch.tensor([token is not None for token in source.tokens], dtype=torch.bool)
    edited = found.distances[spelled].long()
    tokens = len(edited)
    edited = edited[edited >= 0]  # -1 where the target has no token with bytes
    counts = edited.clamp(max=LAST).bincount(minlength=LAST + 1).tolist()
    mean = int(edited.sum()) / max(len(edited), 1)
    return Summary(tokens, counts[0] / max(tokens, 1), mean, tuple(counts))


def worst(source: Vocabulary, found: VocabularyMap, most: int) -> list[int]:
    """The ids of the source's tokens that are edited most, worst first, of equals the smallest."""
    edited = [
        (-distance, i)
        for i, distance in enumerate(found.distances.tolist())
        if source.tokens[i] is not None and distance > 0
    ]
    return [i for _, i in sorted(edited)[:most]]


def readable(token: bytes) -> str:
    """A token in quotes, as text where it is text, other bytes and control signs escaped."""
    text = token.replace(b"\\", b"\\\\").decode(errors="backslashreplace")
    signs = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f'"{"".join(signs)}"'

"""The nearest token of one vocabulary for each token of another: FedMKT's vocabulary map.

FedMKT (arXiv 2406.02224), section 3.2, after FuseLLM (arXiv 2401.10491): the nearest by minimum
edit distance. Here the distance counts bytes, and every map is exact and the same on each machine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist
from torch import Tensor

from coterie.alignment.vocabulary import Vocabulary

BLOCK = 2**24
"""Distances that are in memory at a time."""
STANDS_FOR = {
    "eos": ("eos", "bos"),
    "bos": ("bos", "eos"),
    "unk": ("unk",),
    "pad": ("pad", "eos"),
}
"""The target's roles that a source's role may become, the first that there is."""


@dataclass(frozen=True)
class VocabularyMap:
    """For each token of a source vocabulary, the token of a target that comes nearest."""

    ids: Tensor
    """(source tokens,) int32: the target's id; -1: none."""
    distances: Tensor
    """(source tokens,) int16: bytes edited on the way; 0 between special tokens; -1: no token."""


def vocabulary_map(
    source: Vocabulary, target: Vocabulary, progress: Callable[[float], None] = lambda share: None
) -> VocabularyMap:
    """Map a source's tokens to those of a target with the least edit distance (Levenshtein's).

    Among equals it takes the lexicographically smallest bytes, and of ids that spell the same the
    smallest. Special tokens become those of the same role (see STANDS_FOR) and nothing else.

    progress: told the share of tokens that are done, from 0 to 1, now and then.
    """
    smallest: dict[bytes, int] = {}
    for i, token in enumerate(target.tokens):
        if token is not None:
            smallest.setdefault(token, i)
    words, mine = sorted(smallest), {token for token in source.tokens if token is not None}
    others = sorted(mine - smallest.keys()) if words else []
    found = {token: (i, 0) for token, i in smallest.items()}
    nearest = (part.tolist() for part in _nearest(others, words, progress))
    for token, place, edited in zip(others, *nearest, strict=True):
        found[token] = (smallest[words[place]], edited)
    pairs = [(-1, -1) if token is None else found.get(token, (-1, -1)) for token in source.tokens]
    for i, stands_for in _special(source, target).items():
        pairs[i] = (stands_for, 0)
    table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return VocabularyMap(table[:, 0].int(), table[:, 1].short())


def _special(source: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """The target's id for each special token of a source that has a counterpart."""
    found: dict[int, int] = {}
    for role, others in STANDS_FOR.items():
        ids = [target.roles[other] for other in others if other in target.roles]
        if ids and role in source.roles:  # a token of several roles keeps its first
            found.setdefault(source.roles[role], ids[0])
    return found


def _nearest(
    queries: Sequence[bytes], words: Sequence[bytes], progress: Callable[[float], None]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first of the nearest words of each query: its place among the words, and its distance.

    Queries of a length meet words of their own length, then those one byte shorter or longer, and
    so on: the difference in length is a lower bound, at which a query that has come closer stops.
    """
    by_length = _by_length(words)
    # Smaller keys are nearer words, and among these earlier ones.
    keys = np.full(len(queries), np.iinfo(np.int64).max)
    done = 0
    for length, group in _by_length(queries).items():
        done += len(group)
        for other in sorted(by_length, key=lambda other: abs(other - length)):
            group = group[keys[group] // len(words) >= abs(other - length)]
            _meet(queries, group, words, by_length[other], keys)
        progress(done / len(queries))
    return keys % max(len(words), 1), keys // max(len(words), 1)


def _by_length(tokens: Sequence[bytes]) -> dict[int, NDArray[np.int64]]:
    """The places of tokens by their length, short ones first."""
    lengths = np.array([len(token) for token in tokens])
    return {int(length): np.flatnonzero(lengths == length) for length in np.unique(lengths)}


def _meet(
    queries: Sequence[bytes],
    some: NDArray[np.int64],
    words: Sequence[bytes],
    others: NDArray[np.int64],
    keys: NDArray[np.int64],
) -> None:
    """Lower the keys of some queries to the nearest of some words, both given by their places."""
    choices = [words[place] for place in others]
    step = max(1, BLOCK // len(choices))
    for start in range(0, len(some), step):
        block = some[start : start + step]
        table = cdist(
            [queries[place] for place in block],
            choices,
            scorer=Levenshtein.distance,
            # A byte holds most distances, and the least of many bytes is found fast.
            dtype=np.uint8 if max(len(queries[block[0]]), len(choices[0])) < 256 else np.int32,
            workers=torch.get_num_threads(),
        )
        column = table.argmin(axis=1)
        distance = table[np.arange(len(block)), column].astype(np.int64)
        keys[block] = np.minimum(keys[block], distance * len(words) + others[column])

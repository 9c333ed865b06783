"""FedMKT's vocabulary map: the nearest token of a target vocabulary for each source token.

Like FuseLLM (arXiv 2401.10491), FedMKT (arXiv 2406.02224, section 3.2) uses the token with the
minimum edit distance. Here, the edit distance is the number of edited bytes. The search for the
minimum is exact and has the same result on every machine.
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
"""Maximum number of edit distances that are in memory at the same time."""
STANDS_FOR = {
    "eos": ("eos", "bos"),
    "bos": ("bos", "eos"),
    "unk": ("unk",),
    "pad": ("pad", "eos"),
}
"""A mapping from the role of a special source token to the permitted roles of the target token. If
the target has several of the permitted roles, the first one is used."""


@dataclass(frozen=True)
class VocabularyMap:
    """The nearest token of a target vocabulary for each token of a source vocabulary."""

    ids: Tensor
    """(source tokens,) int32: the id of the target token that is nearest to each source token; -1
    if there is no target token."""
    distances: Tensor
    """(source tokens,) int16: edit distance in bytes between the two tokens; 0 for special tokens,
    and -1 if there is no target token."""


def vocabulary_map(
    source: Vocabulary, target: Vocabulary, progress: Callable[[float], None] = lambda share: None
) -> VocabularyMap:
    """Map each source token to the target token with the minimum Levenshtein distance.

    Ties are resolved in favour of the lexicographically smallest bytes. If several target tokens
    have these bytes, the token with the smallest id is used. A special token is mapped only to a
    special token with a corresponding role (see `STANDS_FOR`).

    Args:
        source: The vocabulary to map from.
        target: The vocabulary to map to.
        progress: Called repeatedly with the share of tokens processed, from 0 to 1.
    """
    smallest: dict[bytes, int] = {}
    for i, token in enumerate(target.tokens):
        if token is not None:
            smallest.setdefault(token, i)
    words = sorted(smallest)
    spellings = {token for token in source.tokens if token is not None}
    queries = sorted(spellings - smallest.keys()) if words else []
    mapped = {token: (i, 0) for token, i in smallest.items()}
    nearest = (array.tolist() for array in _nearest(queries, words, progress))
    for token, index, distance in zip(queries, *nearest, strict=True):
        mapped[token] = (smallest[words[index]], distance)
    pairs = [(-1, -1) if token is None else mapped.get(token, (-1, -1)) for token in source.tokens]
    for i, stands_for in _special(source, target).items():
        pairs[i] = (stands_for, 0)
    table = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return VocabularyMap(table[:, 0].int(), table[:, 1].short())


def _special(source: Vocabulary, target: Vocabulary) -> dict[int, int]:
    """Return a mapping from the ids of special source tokens to the ids of their counterparts.

    The counterparts are special tokens of the target. Source tokens without a counterpart are left
    out.
    """
    mapped: dict[int, int] = {}
    for role, candidates in STANDS_FOR.items():
        ids = [target.roles[candidate] for candidate in candidates if candidate in target.roles]
        if ids and role in source.roles:  # a token with several roles maps by the first
            mapped.setdefault(source.roles[role], ids[0])
    return mapped


def _nearest(
    queries: Sequence[bytes], words: Sequence[bytes], progress: Callable[[float], None]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the word with the smallest edit distance in bytes for each query.

    If several words are equally near, the first of these words is returned. Queries are compared
    with words of equal length first, then with words that are one byte shorter or longer, and so
    on. The difference in length is a lower bound on the distance. A query is therefore not compared
    with the remaining words once the difference in length exceeds the smallest distance found.

    Returns:
        Two arrays: the index of each query's nearest word, and the edit distance in bytes between
        the query and this word.
    """
    by_length = _by_length(words)
    # A key is distance * len(words) + index, so the first of the nearest words has the minimum.
    keys = np.full(len(queries), np.iinfo(np.int64).max)
    processed = 0
    for length, group in _by_length(queries).items():
        processed += len(group)
        for other in sorted(by_length, key=lambda other: abs(other - length)):
            group = group[keys[group] // len(words) >= abs(other - length)]
            _update_keys(queries, group, words, by_length[other], keys)
        progress(processed / len(queries))
    return keys % max(len(words), 1), keys // max(len(words), 1)


def _by_length(tokens: Sequence[bytes]) -> dict[int, NDArray[np.int64]]:
    """Group the indices of tokens by the tokens' lengths in bytes, shortest tokens first."""
    lengths = np.array([len(token) for token in tokens])
    return {int(length): np.flatnonzero(lengths == length) for length in np.unique(lengths)}


def _update_keys(
    queries: Sequence[bytes],
    query_indices: NDArray[np.int64],
    words: Sequence[bytes],
    word_indices: NDArray[np.int64],
    keys: NDArray[np.int64],
) -> None:
    """Compare selected queries with selected words, and update the queries' keys in place.

    A query's key is an integer computed from two numbers: the distance from the query to the
    nearest word found so far, and the index of this word. If a selected word is nearer, or equally
    near with a lower index, the key is recomputed for the selected word.

    Args:
        queries: All queries.
        query_indices: The indices of the selected queries, which must have equal lengths.
        words: All words.
        word_indices: The indices of the selected words, which must have equal lengths.
        keys: The key of every query, which is distance * len(words) + index.
    """
    choices = [words[index] for index in word_indices]
    size = max(1, BLOCK // len(choices))
    for start in range(0, len(query_indices), size):
        block = query_indices[start : start + size]
        table = cdist(
            [queries[index] for index in block],
            choices,
            scorer=Levenshtein.distance,
            # Most distances fit into a byte, and argmin is faster on an array of bytes.
            dtype=np.uint8 if max(len(queries[block[0]]), len(choices[0])) < 256 else np.int32,
            workers=torch.get_num_threads(),
        )
        column = table.argmin(axis=1)
        distance = table[np.arange(len(block)), column].astype(np.int64)
        keys[block] = np.minimum(keys[block], distance * len(words) + word_indices[column])

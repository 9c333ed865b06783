"""Search for near duplicates: records with almost equal contents.

Records are compared part by part. The parts are the instruction, the input and the answer, or the
turns of each role in a conversation. The words that a template adds are not compared.
"""

import re
from collections.abc import Callable, Sequence
from typing import cast

import numpy
from numpy.typing import NDArray

NEAR = 0.8
"""The minimum Jaccard similarity between the sets of shingles of two near duplicates."""
SHINGLE = 8
"""The length of a shingle in bytes.

A shingle is a substring of a text in lower case with single spaces between words.
"""
COMMON = 50
"""If more than this many records contain a shingle, the shingle proposes no pairs of records.

This limit bounds the number of comparisons.
"""
FEW = 3
"""If at most this many records contain a shingle, the shingle is never boilerplate."""
AGREEING = 0.25
"""If the share of agreeing records is below this value, the common text of a pair is boilerplate.

The share is computed over the other records that contain the common text. A record agrees if, where
the two records of the pair differ, it contains the shingles of one of these two records.
"""
BANDS, ROWS = 20, 5
"""The number of MinHash bands and the number of rows per band.

With these values, a pair with similarity 0.8 is missed with a probability of 1 / 2,800.
"""

Hashes = NDArray[numpy.uint32]
_NUMBER = re.compile(r"\d+")
_DIGITS = 16
"""The minimum length to which the digits of a number are repeated.

The repetition gives numbers more weight, because texts with different numbers have different
contents.
"""


def near_pairs(
    records: Sequence[Sequence[str]], progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[int, int]]:
    """Return the indices of all pairs of near duplicates.

    Two records are near duplicates if all their corresponding parts are near duplicates. MinHash
    (A. Broder, 1997) proposes pairs of records. The similarity of each proposed pair is then
    computed exactly.

    Args:
        records: The parts of each record. No two records are equal.
        progress: A callback that receives the number of compared records and the total number.

    Returns:
        Pairs (a, b) of indices with a < b, in sorted order.
    """
    from datasketch import MinHash, MinHashLSH  # imports SciPy, which takes half a second

    parts = [[_shingles(part) for part in record] for record in records]
    wholes = [p[0] if len(p) == 1 else numpy.unique(numpy.concatenate(p)) for p in parts]
    if not wholes:
        return []
    values, counts = numpy.unique(numpy.concatenate(wholes), return_counts=True)

    def held(shingles: Hashes) -> NDArray[numpy.int64]:
        """Return, for each shingle, the number of records that contain the shingle."""
        return counts[numpy.searchsorted(values, shingles)]

    def are_near(a: Sequence[Hashes], b: Sequence[Hashes]) -> bool:
        return len(a) == len(b) and all(
            _is_near(a_part, b_part, held) for a_part, b_part in zip(a, b, strict=True)
        )

    empty = MinHash(BANDS * ROWS, hashfunc=int)
    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    pairs: list[tuple[int, int]] = []
    for b, shingles in enumerate(wholes):
        progress(b, len(wholes))
        rare = shingles[held(shingles) <= COMMON]
        if not len(rare):
            continue
        sketch = empty.copy()
        sketch.update_batch(rare)
        proposed = sorted(cast("list[int]", index.query(sketch)))
        pairs += [(a, b) for a in proposed if are_near(parts[a], parts[b])]
        index.insert(b, sketch, check_duplication=False)
    return sorted(pairs)


def _is_near(a: Hashes, b: Hashes, held: Callable[[Hashes], NDArray[numpy.int64]]) -> bool:
    """Return whether two parts are near duplicates, ignoring boilerplate.

    Boilerplate is text that many unrelated records share, such as a header. Two parts whose shared
    text is boilerplate are not near duplicates. To recognise boilerplate, the function considers
    all other records that contain the shared text. For each shingle that only one of the two parts
    contains, it estimates which fraction of these other records contain the shingle. If the mean
    fraction is below `AGREEING`, all records with the shared text are taken to be unrelated, and
    the shared text is boilerplate. Otherwise, these records are taken to be edited copies of one
    text. Text in at most `FEW` records is never boilerplate.

    Args:
        a: The shingles of a part.
        b: The shingles of the other part.
        held: A function that returns, for each shingle, the number of records that contain it.
    """
    both = numpy.intersect1d(a, b, assume_unique=True)
    different = numpy.setxor1d(a, b, assume_unique=True)
    needed = int(numpy.ceil(len(different) * NEAR / (1 - NEAR) - 1e-9))
    if len(both) < needed:
        return False
    if not needed:
        return True
    # The `needed` rarest common shingles suffice for the similarity. Each of them is contained in
    # at most `records` records.
    records = int(numpy.partition(held(both), needed - 1)[needed - 1])
    agreeing = float((held(different) - 1).mean())
    return records <= FEW or agreeing >= AGREEING * (records - 2)


def _shingles(text: str) -> Hashes:
    """Return the sorted distinct hashes of all shingles of a text.

    The text is padded at both ends, so that a change near an end affects as many shingles as
    a change elsewhere.
    """
    plain = " ".join(text.lower().split()).rstrip(" .!?…。！？")
    plain = _NUMBER.sub(lambda number: number[0] * -(-_DIGITS // len(number[0])), plain)
    padding = b"\n" * (SHINGLE - 1)
    raw = numpy.frombuffer(padding + plain.encode() + padding, "u1")
    runs = numpy.lib.stride_tricks.sliding_window_view(raw, SHINGLE)
    numbers = numpy.ascontiguousarray(runs).view("<u8").ravel()
    mixed = (numbers ^ (numbers >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15)
    return numpy.unique((mixed >> numpy.uint64(32)).astype(numpy.uint32))

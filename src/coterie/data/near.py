"""Search for near duplicates: records with almost equal contents.

Records are compared part by part (the instruction, the input and the answer, or the turns of each
role in a conversation), without the text of templates.
"""

import re
from collections.abc import Callable, Sequence
from typing import cast

import numpy
from numpy.typing import NDArray

NEAR = 0.8
"""The minimum Jaccard similarity of the shingles of two near duplicates."""
SHINGLE = 8
"""The length of a shingle in bytes. Shingles are taken from lower-case text with single spaces."""
COMMON = 50
"""The maximum number of records with a shingle that proposes pairs; bounds the comparisons."""
FEW = 3
"""The number of records up to which a common shingle is never boilerplate."""
AGREEING = 0.25
"""The minimum share of other records that must agree with one record of a pair.

Agreement is measured on the shingles in which the pair differs. If fewer records agree, the text
that the pair has in common with them is boilerplate.
"""
BANDS, ROWS = 20, 5
"""MinHash bands and rows: texts with similarity 0.8 are missed with a probability of 1 / 2,800."""

Hashes = NDArray[numpy.uint32]
_NUMBER = re.compile(r"\d+")
_DIGITS = 16
"""The length to which a number is repeated, as a different number is different content."""


def near_pairs(
    records: Sequence[Sequence[str]], progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[int, int]]:
    """Return the pairs (a, b), a < b, of records that are near duplicates, sorted.

    Two records are near duplicates if all their corresponding parts are. MinHash (A. Broder, 1997)
    proposes pairs, whose similarity is then computed exactly.

    Args:
        records: The parts of each record; no two records are equal.
        progress: A callback that receives the number of records compared and the total.
    """
    from datasketch import MinHash, MinHashLSH  # imports SciPy, which takes half a second

    parts = [[_shingles(part) for part in record] for record in records]
    wholes = [p[0] if len(p) == 1 else numpy.unique(numpy.concatenate(p)) for p in parts]
    if not wholes:
        return []
    values, counts = numpy.unique(numpy.concatenate(wholes), return_counts=True)

    def held(shingles: Hashes) -> NDArray[numpy.int64]:
        """Return the number of records with each shingle."""
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

    Boilerplate is text that many records share although their contents differ, such as a header.
    It is recognised by the other records that contain the common text: on the shingles in which the
    two parts differ, records that share only a header agree with neither part, whereas most of
    several edited copies of one text agree with one of the two.

    Args:
        a: The shingles of a part.
        b: The shingles of the other part.
        held: A function that returns the number of records with each shingle.
    """
    both = numpy.intersect1d(a, b, assume_unique=True)
    different = numpy.setxor1d(a, b, assume_unique=True)
    needed = int(numpy.ceil(len(different) * NEAR / (1 - NEAR) - 1e-9))
    if len(both) < needed:
        return False
    if not needed:
        return True
    # The rarest common shingles that suffice for the similarity are in at most `records` records.
    records = int(numpy.partition(held(both), needed - 1)[needed - 1])
    agreeing = float((held(different) - 1).mean())
    return records <= FEW or agreeing >= AGREEING * (records - 2)


def _shingles(text: str) -> Hashes:
    """Return the sorted distinct hashes of all shingles of a text.

    The text is padded at both ends, so that a change there affects as many shingles as elsewhere.
    """
    plain = " ".join(text.lower().split()).rstrip(" .!?…。！？")
    plain = _NUMBER.sub(lambda number: number[0] * -(-_DIGITS // len(number[0])), plain)
    padding = b"\n" * (SHINGLE - 1)
    raw = numpy.frombuffer(padding + plain.encode() + padding, "u1")
    runs = numpy.lib.stride_tricks.sliding_window_view(raw, SHINGLE)
    numbers = numpy.ascontiguousarray(runs).view("<u8").ravel()
    mixed = (numbers ^ (numbers >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15)
    return numpy.unique((mixed >> numpy.uint64(32)).astype(numpy.uint32))

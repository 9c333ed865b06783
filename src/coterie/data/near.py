"""Near duplicates: records that differ in so little that one tells what is in the other.

A record is compared part by part (its instruction, its input, its answer, or what each role says in
a conversation), and never with the text of a template.
"""

import re
from collections.abc import Callable, Sequence
from typing import cast

import numpy
from numpy.typing import NDArray

NEAR = 0.8
"""Jaccard similarity of two texts' shingles from which they are nearly the same."""
SHINGLE = 8
"""Bytes of a shingle: a run of text, in lower case and with single spaces."""
COMMON = 50
"""A shingle in more records than this proposes no pairs, which bounds how many are compared."""
FEW = 3
"""A shingle that no more records than this contain is never boilerplate."""
AGREEING = 0.25
"""Share of other records that must agree with one of a pair where the pair differs, or else what
they all have in common is boilerplate."""
BANDS, ROWS = 20, 5
"""MinHash bands and rows: two texts with similarity 0.8 are missed once in 2,800 times."""

Hashes = NDArray[numpy.uint32]
_NUMBER = re.compile(r"\d+")
_DIGITS = 16
"""Characters that a number counts as, because another number is another content."""


def near_pairs(
    records: Sequence[Sequence[str]], progress: Callable[[int, int], None] = lambda done, of: None
) -> list[tuple[int, int]]:
    """Return the pairs a < b of distinct records that are nearly the same, in order.

    Two records are nearly the same if each part of one is nearly the same as its counterpart in the
    other. MinHash proposes pairs (A. Broder, 1997), whose similarity is then computed.

    Args:
        records: the parts of each record.
        progress: receives the number of records compared and the total.
    """
    from datasketch import MinHash, MinHashLSH  # imports SciPy, which takes half a second

    parts = [[_shingles(part) for part in record] for record in records]
    wholes = [p[0] if len(p) == 1 else numpy.unique(numpy.concatenate(p)) for p in parts]
    if not wholes:
        return []
    values, counts = numpy.unique(numpy.concatenate(wholes), return_counts=True)

    def held(shingles: Hashes) -> NDArray[numpy.int64]:
        """How many records have each shingle."""
        return counts[numpy.searchsorted(values, shingles)]

    def are_near(a: Sequence[Hashes], b: Sequence[Hashes]) -> bool:
        return len(a) == len(b) and all(
            _is_near(one, other, held) for one, other in zip(a, b, strict=True)
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
    """Return whether two parts are nearly the same, boilerplate apart; `held`: by how many records.

    Records that share a header and differ in the text after it are alike in the header alone. That
    shows in the other records with the header: where these two differ, they agree with neither. Of
    several edited copies of one text, most agree with one of the two.
    """
    both = numpy.intersect1d(a, b, assume_unique=True)
    different = numpy.setxor1d(a, b, assume_unique=True)
    needed = int(numpy.ceil(len(different) * NEAR / (1 - NEAR) - 1e-9))
    if len(both) < needed:
        return False
    if not needed:
        return True
    # The rarest shingles that suffice for the similarity: at most so many records have them.
    records = int(numpy.partition(held(both), needed - 1)[needed - 1])
    agreeing = float((held(different) - 1).mean())
    return records <= FEW or agreeing >= AGREEING * (records - 2)


def _shingles(text: str) -> Hashes:
    """Return hashes of all runs of `SHINGLE` bytes, each once, sorted.

    Runs that reach beyond either end count, so that a change there weighs as much as elsewhere.
    """
    plain = " ".join(text.lower().split()).rstrip(" .!?…。！？")
    plain = _NUMBER.sub(lambda number: number[0] * -(-_DIGITS // len(number[0])), plain)
    around = b"\n" * (SHINGLE - 1)
    raw = numpy.frombuffer(around + plain.encode() + around, "u1")
    runs = numpy.lib.stride_tricks.sliding_window_view(raw, SHINGLE)
    numbers = numpy.ascontiguousarray(runs).view("<u8").ravel()
    mixed = (numbers ^ (numbers >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15)
    return numpy.unique((mixed >> numpy.uint64(32)).astype(numpy.uint32))

"""Near duplicates by the definition, comparing every record with every other."""

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

Record = Sequence[str]


def runs_of(part: str) -> set[bytes]:
    """Return all runs of eight bytes of a text, padded at both ends; digits count several times."""
    plain = " ".join(part.lower().split()).rstrip(" .!?…。！？")
    plain = re.sub(r"\d+", lambda n: n[0] * (-(-16 // len(n[0]))), plain)
    raw = b"\n" * 7 + plain.encode() + b"\n" * 7
    return {raw[i : i + 8] for i in range(len(raw) - 7)}


def are_near(a: set[bytes], b: set[bytes], counts: Counter[bytes]) -> bool:
    """Return whether two parts share 0.8 of their runs, apart from boilerplate."""
    different = a ^ b
    for most in range(1, max(counts.values()) + 1):
        shared = [run for run in a & b if counts[run] <= most]
        if len(shared) < 0.8 * (len(shared) + len(different)) - 1e-9:
            continue
        agreeing = sum(counts[run] - 1 for run in different)
        if most <= 3 or not different or agreeing / len(different) >= 0.25 * (most - 2):
            return True
    return not different


def naive_pairs(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the pairs a < b of records that are nearly equal."""
    parts = [[runs_of(part) for part in record] for record in records]
    counts = Counter(run for record in parts for run in set[bytes]().union(*record))
    return [
        (a, b)
        for a, b in combinations(range(len(records)), 2)
        if len(parts[a]) == len(parts[b])
        and all(are_near(x, y, counts) for x, y in zip(parts[a], parts[b], strict=True))
    ]


def changed(text: str, words: int, draw: random.Random) -> str:
    """Return a text with some of its words replaced."""
    parts = text.split(" ")
    for place in draw.sample(range(len(parts)), words):
        parts[place] = f"word{draw.randrange(10**6)}"
    return " ".join(parts)

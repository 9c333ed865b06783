"""How long the vocabulary maps of real tokenizers take, beside brute force, and how near they come.

For every ordered pair of the tokenizers in a folder. Brute force measures the distance of each
source token to each target token; it is timed on a random sample of the source's tokens, and scaled
up to all of them. Both compute in as many threads as torch may use, with the same library.
"""

import random
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from common import options_of, show, write
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

from coterie.alignment import Vocabulary, read_vocabulary, vocabulary_map
from coterie.alignment.summary import summarise

BLOCK = 20
"""Source tokens that brute force takes at a time: a row of distances each is in memory."""


@dataclass(frozen=True)
class Row:
    """One pair."""

    source: str
    target: str
    seconds: float
    brute: float
    """Seconds of brute force, scaled up from the sample."""
    exact: float
    """The share of the source's tokens that the target has."""
    mean: float
    """Bytes edited per token."""


def brute_force(source: Vocabulary, target: Vocabulary, sample: int) -> float:
    """Seconds for all of the source's tokens."""
    words = [token for token in target.tokens if token is not None]
    tokens = [token for token in source.tokens if token is not None]
    some = random.Random(0).sample(tokens, min(sample, len(tokens)))
    start = time.perf_counter()
    for n in range(0, len(some), BLOCK):
        cdist(
            some[n : n + BLOCK],
            words,
            scorer=Levenshtein.distance,
            workers=torch.get_num_threads(),
        ).argmin(axis=1)
    return (time.perf_counter() - start) * len(tokens) / len(some)


def measure(source: str, target: str, own: dict[str, Vocabulary], sample: int) -> Row:
    start = time.perf_counter()
    found = vocabulary_map(own[source], own[target])
    seconds = time.perf_counter() - start
    figures = summarise(own[source], found)
    brute = brute_force(own[source], own[target], sample)
    return Row(source, target, seconds, brute, figures.exact, figures.mean)


def cells(row: Row) -> list[str]:
    return [
        f"{row.source} -> {row.target}",
        f"{row.seconds:.1f}",
        f"{row.brute:.0f}",
        f"{row.brute / row.seconds:.0f}",
        f"{row.exact:.1%}",
        f"{row.mean:.2f}",
    ]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("folder", type=Path, help="holds a folder for each tokenizer")
    parser.add_argument("--sample", type=int, default=200, help="source tokens for brute force")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folders = sorted(path for path in options.folder.iterdir() if path.is_dir())
    own = {path.name: read_vocabulary(path) for path in folders}
    rows = [measure(a, b, own, options.sample) for a, b in permutations(own, 2)]
    sizes = ", ".join(f"{name} {len(v.tokens):,}" for name, v in own.items())
    show(
        f"Vocabulary maps, {options.threads} threads",
        ("source -> target", "seconds", "brute force", "ratio", "exact", "mean edits"),
        [cells(row) for row in rows],
        f"Tokens: {sizes}.",
    )
    write(options, rows=rows)


if __name__ == "__main__":
    main()

"""Distinct-2 (Li et al., arXiv 1510.03055): how many of the bigrams that are generated differ."""

from collections.abc import Sequence
from itertools import pairwise

from coterie import Metric
from coterie.data.measured import Measured


class Distinct2(Metric):
    """The distinct bigrams of a generated answer over all its bigrams: low where it repeats itself.

    An answer of fewer than two words has no score.
    """

    name = "distinct-2"
    title = "distinct-2"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each answer."""
        return [_distinct(text.split()) for text in measured.texts]


def _distinct(words: Sequence[str]) -> float | None:
    bigrams = list(pairwise(words))
    return len(set(bigrams)) / len(bigrams) if bigrams else None

"""Exact match: whether the model writes the right answer."""

from collections.abc import Sequence
from unicodedata import normalize

from coterie.data.measured import Measured
from coterie.evaluation.metrics import Metric


class ExactMatch(Metric):
    """1 if a generated answer is the right one, else 0.

    Spaces around the texts do not count, nor does how Unicode composes an accented letter (NFC).
    """

    name = "exact_match"
    title = "exact match"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each answer."""
        both = (measured.answers, measured.texts)
        plain = ([normalize("NFC", text).strip() for text in texts] for texts in both)
        return [float(right == text) for right, text in zip(*plain, strict=True)]

"""Exact match: the share of generated answers that equal the right answer."""

from collections.abc import Sequence
from unicodedata import normalize

from coterie.data.measured import Measured
from coterie.evaluation.metrics import Metric


class ExactMatch(Metric):
    """The share of generated answers that equal the right answer.

    Before the comparison, both texts are stripped of surrounding white space and normalised to
    Unicode's NFC. The score of an item is 1 if the texts are equal, and 0 otherwise.
    """

    name = "exact_match"
    title = "exact match"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        columns = (measured.answers, measured.texts)
        plain = ([normalize("NFC", text).strip() for text in texts] for texts in columns)
        return [float(right == text) for right, text in zip(*plain, strict=True)]

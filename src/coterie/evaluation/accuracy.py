"""Accuracy: the share of samples whose right answer is the likeliest of their choices."""

from collections.abc import Sequence

from coterie.data.measured import WORST, Measured
from coterie.evaluation.metrics import Metric, instance

EQUAL = 1e-6
"""The relative tolerance within which two losses per token are treated as equal.

The tolerance is about 8 times the machine epsilon of float32, the type in which losses are
computed.
"""


class Accuracy(Metric):
    """The share of samples whose right answer has a lower loss per token than all wrong choices.

    The loss per token is the mean loss over the tokens of a choice. The score of a sample is 1 if
    the right answer has the lowest loss per token of all choices, and 0 otherwise. If the right
    answer is one of k choices that are tied for the lowest loss, the score is 1/k, which is the
    expected score of a random tie-break. Choices are tied if float32 rounding can explain the
    difference between their losses per token; see `EQUAL`. If no choice has a finite loss, the
    score is 0.
    """

    name = title = "accuracy"
    needs = "choices"

    def score(self, measured: Measured) -> Sequence[float | None]:
        choices, count = measured.choices, len(measured.nats)
        assert choices is not None, "the metric needs choices"
        owners, means = choices.owners, choices.nats / choices.tokens
        best = means[:count].scatter_reduce(0, owners[count:], means[count:], "amin")
        lowest = best[owners]
        likeliest = ((means <= lowest + EQUAL * lowest.abs()) & (lowest < WORST)).double()
        ties = likeliest[:count].scatter_add(0, owners[count:], likeliest[count:])
        shares = (likeliest[:count] / ties.clamp(min=1)).tolist()
        return [
            share if has_choices else None
            for share, has_choices in zip(shares, choices.given, strict=True)
        ]


ACCURACY = instance(Accuracy)

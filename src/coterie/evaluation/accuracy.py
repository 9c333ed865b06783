"""Accuracy: whether a sample's answer is likelier than the others that it has to choose from."""

from collections.abc import Sequence

from coterie.data.measured import WORST, Measured
from coterie.evaluation.metrics import Metric, instance

EQUAL = 1e-6
"""Relative difference of two losses per token up to which they are equal: 8 times the machine
epsilon of float32, in which they are computed."""


class Accuracy(Metric):
    """1 if a sample's own answer is likelier per token than its other choices, else 0.

    Where the answer is among k equally likely choices, it is 1/k, the expected score of a draw
    among the k. Equal means equal within the rounding of float32. Where no choice has a finite
    loss, the score is 0.
    """

    name = title = "accuracy"
    needs = "choices"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each sample; None if it has no choices."""
        choices, count = measured.choices, len(measured.nats)
        assert choices is not None, "the metric needs choices"
        owners, means = choices.owners, choices.nats / choices.tokens
        best = means[:count].scatter_reduce(0, owners[count:], means[count:], "amin")
        of = best[owners]
        likeliest = ((means <= of + EQUAL * of.abs()) & (of < WORST)).double()
        ties = likeliest[:count].scatter_add(0, owners[count:], likeliest[count:])
        shares = (likeliest[:count] / ties.clamp(min=1)).tolist()
        return [
            share if given else None for share, given in zip(shares, choices.given, strict=True)
        ]


ACCURACY = instance(Accuracy)

"""Reward accuracy: whether the chosen answer of a pair has the higher reward."""

from collections.abc import Sequence

from coterie.data.measured import Measured
from coterie.evaluation.metrics import Metric


class RewardAccuracy(Metric):
    """1 if the chosen answer has the higher reward, 0 if the rejected one has, else half.

    Rewards that differ by rounding at most are equal, as all are under the reference.
    """

    name = "reward_accuracy"
    title = "reward accuracy"
    needs = "pairs"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each pair."""
        return measured.preferred

"""Reward accuracy: the share of pairs whose chosen answer has the higher reward."""

from collections.abc import Sequence

from coterie.data.measured import Measured
from coterie.evaluation.metrics import Metric


class RewardAccuracy(Metric):
    """1 if a pair's chosen answer has the higher reward, 0 if the rejected one has, 0.5 for a tie.

    Rewards that differ by no more than rounding are tied. All pairs are tied for the reference
    model itself, so its reward accuracy is 0.5.
    """

    name = "reward_accuracy"
    title = "reward accuracy"
    needs = "pairs"

    def score(self, measured: Measured) -> Sequence[float | None]:
        return measured.preferred

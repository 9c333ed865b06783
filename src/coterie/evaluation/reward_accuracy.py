"""Reward accuracy: the share of pairs whose chosen answer has the higher reward."""

from collections.abc import Sequence

from coterie.data.measured import Measured
from coterie.evaluation.metrics import Metric


class RewardAccuracy(Metric):
    """The share of pairs whose chosen answer has the higher reward.

    The reward of an answer is proportional to the difference between the answer's log-likelihoods
    under the evaluated model and under a reference model. The score of a pair is 1 if the chosen
    answer has the higher reward, 0.5 for a tie, and 0 otherwise. Two rewards are tied if they
    differ by no more than rounding can cause. If the evaluated model is the reference model itself,
    all rewards are 0. All pairs are then tied, so the reward accuracy is 0.5.
    """

    name = "reward_accuracy"
    title = "reward accuracy"
    needs = "pairs"

    def score(self, measured: Measured) -> Sequence[float | None]:
        return measured.preferred

"""The loss of direct preference optimisation (DPO, arXiv 2305.18290) on rewards of answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Reference:
    """What answers are compared with."""

    logprobs: Tensor
    """The reference's log-likelihood of each pair's chosen and rejected answer, ends included:
    (n, 2) float64, in nats."""
    beta: float
    """Reward per nat that an answer is likelier than under the reference."""
    label_smoothing: float
    """The probability that a pair is the wrong way round."""
    rounding: Tensor
    """The largest difference between a pair's two rewards that may be due to rounding:
    (n,) float64."""

    def only(self, rows: Tensor | slice) -> Self:
        """Return the reference of some pairs."""
        return replace(self, logprobs=self.logprobs[rows], rounding=self.rounding[rows])


class Rewards(NamedTuple):
    """The rewards of pairs of answers."""

    values: Tensor
    """The rewards of each pair's chosen and rejected answer: (n, 2)."""
    rounding: Tensor
    """The largest margin of each pair that may be due to rounding: (n,)."""

    @property
    def margins(self) -> Tensor:
        """The reward of each chosen answer minus that of the rejected one: (n,)."""
        return self.values[:, 0] - self.values[:, 1]

    @property
    def preferred(self) -> Tensor:
        """1 where the chosen answer has the higher reward, 0 where the rejected one has: (n,).

        Half where the rewards differ by rounding at most, as they do under the reference.
        """
        margins = self.margins
        return (1 + margins.sign() * (margins.abs() > self.rounding.to(margins.device))) / 2

    @staticmethod
    def figures(parts: "Sequence[Rewards]") -> dict[str, float]:
        """Return the means of a step's rewards over its pairs; `parts`: those of its pieces."""
        values = torch.cat([part.values.cpu().double() for part in parts])
        whole = Rewards(values, torch.cat([part.rounding for part in parts]))
        chosen, rejected = values.unbind(1)
        return {
            "chosen": fmean(chosen.tolist()),
            "rejected": fmean(rejected.tolist()),
            "margin": fmean(whole.margins.tolist()),
            "accuracy": fmean(whole.preferred.tolist()),
        }


def rewards(logprobs: Tensor, reference: Reference) -> Rewards:
    """Return beta (log pi(y|x) - log pi_ref(y|x)) of log-likelihoods (n, 2), chosen ones first."""
    theirs = reference.logprobs.to(logprobs.dtype).to(logprobs.device)  # not all have float64
    return Rewards(reference.beta * (logprobs - theirs), reference.rounding)


def preference_losses(rewards: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h) of each pair's margin h: (n,).

    Without smoothing it is eq. 7. With it, it is "conservative DPO" (E. Mitchell, "A note on DPO
    with noisy preferences and relationship to IPO", 2023): eps is the share of pairs that are the
    wrong way round.
    """
    h, eps = rewards[:, 0] - rewards[:, 1], label_smoothing
    return -(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h)

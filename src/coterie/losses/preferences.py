"""The loss of direct preference optimisation (DPO, arXiv 2305.18290) on pairs of answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from coterie.bases.devices import moved


@dataclass(frozen=True)
class Reference:
    """The reference model's log-likelihoods of n pairs of answers, and the settings of DPO."""

    logprobs: Tensor
    """The float64 log-likelihoods of the chosen and rejected answers, shaped (n, 2), in nats.

    The log-likelihood of an answer includes the answer's end token.
    """
    beta: float
    """The reward per nat of difference from the reference model's log-likelihood (DPO's beta)."""
    label_smoothing: float
    """The assumed probability that the chosen and rejected answers of a pair are swapped."""
    rounding: Tensor
    """The largest margins that rounding errors alone can cause, shaped (n,), float64."""

    def only(self, rows: Tensor | slice) -> Self:
        """Return the reference for the pairs selected by `rows`, an index tensor or a slice."""
        return replace(self, logprobs=self.logprobs[rows], rounding=self.rounding[rows])


class Rewards(NamedTuple):
    """The rewards of the two answers in each of n pairs."""

    values: Tensor
    """The rewards of the chosen and rejected answers, shaped (n, 2)."""
    rounding: Tensor
    """The largest margins that rounding errors alone can cause, shaped (n,)."""

    @property
    def margins(self) -> Tensor:
        """The chosen answer's reward minus the rejected answer's reward, shaped (n,)."""
        return self.values[:, 0] - self.values[:, 1]

    @property
    def preferred(self) -> Tensor:
        """The accuracy on each pair, shaped (n,).

        The accuracy is 1 if the chosen answer has the higher reward, and 0 if the rejected answer
        has the higher reward. It is 0.5 if the two rewards are equal up to rounding errors, as they
        are while the trained model is still equal to the reference model.
        """
        margins = self.margins
        return (1 + margins.sign() * (margins.abs() > self.rounding.to(margins.device))) / 2

    @staticmethod
    def figures(parts: "Sequence[Rewards]") -> dict[str, float]:
        """Return the mean rewards, margin and accuracy over all pairs of a training step.

        Args:
            parts: A `Rewards` object for each piece into which the step's batch was split.

        Returns:
            The mean rewards `chosen` and `rejected`, the mean `margin`, and the `accuracy`.
        """
        values = torch.cat([part.values.double() for part in parts])
        rewards = Rewards(values, torch.cat([part.rounding for part in parts]))
        chosen, rejected = values.unbind(1)
        return {
            "chosen": fmean(chosen.tolist()),
            "rejected": fmean(rejected.tolist()),
            "margin": fmean(rewards.margins.tolist()),
            "accuracy": fmean(rewards.preferred.tolist()),
        }


def rewards(logprobs: Tensor, reference: Reference) -> Rewards:
    """Compute the reward of each answer: beta (log pi(y|x) - log pi_ref(y|x)).

    Here x is the prompt, y is the answer, pi is the trained model, and pi_ref is the reference
    model.

    Args:
        logprobs: The log-likelihoods of the chosen and rejected answers under the trained model, in
            nats, shaped (n, 2).
        reference: The log-likelihoods of the same answers under the reference model, and beta.

    Returns:
        The rewards, with a gradient if `logprobs` has one.
    """
    # Convert before moving: some devices have no float64.
    reference_logprobs = moved(reference.logprobs.to(logprobs.dtype), logprobs.device)
    return Rewards(reference.beta * (logprobs - reference_logprobs), reference.rounding)


def preference_losses(rewards: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) log sigmoid(h) - eps log sigmoid(-h) for each pair's margin h.

    The margin is the reward of the chosen answer minus the reward of the rejected answer. Without
    label smoothing (eps = 0), this is equation 7 of the DPO paper (arXiv 2305.18290). With label
    smoothing, the loss is "conservative DPO" (E. Mitchell, "A note on DPO with noisy preferences
    and relationship to IPO", 2023).

    Args:
        rewards: The rewards of the chosen and rejected answers, shaped (n, 2).
        label_smoothing: The assumed fraction eps of pairs whose two answers are swapped.

    Returns:
        The loss of each pair, shaped (n,).
    """
    h, eps = rewards[:, 0] - rewards[:, 1], label_smoothing
    return -(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h)

"""The loss of direct preference optimisation (DPO, arXiv 2305.18290) on pairs of answers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Reference:
    """The reference model's log-likelihoods of pairs of answers, and the settings of the loss."""

    logprobs: Tensor
    """The log-likelihoods of each pair's chosen and rejected answer with their end tokens: (n, 2).

    In nats, float64.
    """
    beta: float
    """The reward per nat by which an answer is likelier than under the reference model."""
    label_smoothing: float
    """The probability that the two answers of a pair are swapped."""
    rounding: Tensor
    """The largest difference between a pair's rewards that rounding can cause: (n,) float64."""

    def only(self, rows: Tensor | slice) -> Self:
        """Return the reference for some pairs, selected by an index tensor or a slice."""
        return replace(self, logprobs=self.logprobs[rows], rounding=self.rounding[rows])


class Rewards(NamedTuple):
    """The rewards of pairs of answers."""

    values: Tensor
    """The rewards of each pair's chosen and rejected answer: (n, 2)."""
    rounding: Tensor
    """The largest margin of each pair that rounding can cause: (n,)."""

    @property
    def margins(self) -> Tensor:
        """The reward of each chosen answer minus the reward of the rejected answer: (n,)."""
        return self.values[:, 0] - self.values[:, 1]

    @property
    def preferred(self) -> Tensor:
        """The accuracy on each pair: 1 if the chosen answer has the higher reward, else 0: (n,).

        0.5 if the rewards differ only by rounding, as with the reference model itself.
        """
        margins = self.margins
        return (1 + margins.sign() * (margins.abs() > self.rounding.to(margins.device))) / 2

    @staticmethod
    def figures(parts: "Sequence[Rewards]") -> dict[str, float]:
        """Return means over all pairs of a training step.

        Args:
            parts: The rewards of the pieces in which the step's batch was processed.

        Returns:
            The mean rewards `chosen` and `rejected`, the mean `margin`, and the `accuracy`.
        """
        values = torch.cat([part.values.cpu().double() for part in parts])
        rewards = Rewards(values, torch.cat([part.rounding for part in parts]))
        chosen, rejected = values.unbind(1)
        return {
            "chosen": fmean(chosen.tolist()),
            "rejected": fmean(rejected.tolist()),
            "margin": fmean(rewards.margins.tolist()),
            "accuracy": fmean(rewards.preferred.tolist()),
        }


def rewards(logprobs: Tensor, reference: Reference) -> Rewards:
    """Compute the rewards beta (log pi(y|x) - log pi_ref(y|x)).

    Args:
        logprobs: The trained model's log-likelihoods of the chosen and rejected answers: (n, 2), in
            nats.
        reference: The reference for the same pairs.

    Returns:
        The rewards, with a gradient if `logprobs` has one.
    """
    # Convert before moving: some devices have no float64.
    reference_logprobs = reference.logprobs.to(logprobs.dtype).to(logprobs.device)
    return Rewards(reference.beta * (logprobs - reference_logprobs), reference.rounding)


def preference_losses(rewards: Tensor, label_smoothing: float) -> Tensor:
    """Compute -(1 - eps) log sigmoid(h) - eps log sigmoid(-h) of each pair's margin h.

    Without label smoothing (eps = 0) this is equation 7 of the paper, and with it "conservative
    DPO" (E. Mitchell, "A note on DPO with noisy preferences and relationship to IPO", 2023).

    Args:
        rewards: The rewards of each pair's chosen and rejected answer: (n, 2).
        label_smoothing: The fraction eps of pairs whose answers are swapped.

    Returns:
        The loss of each pair: (n,).
    """
    h, eps = rewards[:, 0] - rewards[:, 1], label_smoothing
    return -(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h)

"""Direct preference optimisation (DPO, arXiv 2305.18290): a loss on pairs of answers.

It needs no model of rewards: a policy's reward for an answer is beta times how much likelier the
answer is than under a reference.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.data.kinds.preferences import AnyBatch, PairBatch, Reference
from coterie.losses.tokens import language_model_loss, sample_losses


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


def dpo_loss(model: PreTrainedModel, batch: PairBatch) -> tuple[Tensor, Rewards]:
    """Return the mean over pairs of eq. 7, a scalar with a gradient, and the rewards without.

    An answer's log-likelihood is the sum over its tokens, what ends it included.
    """
    found = rewards(-sample_losses(model, batch.both).view(-1, 2), batch.reference)
    loss = preference_losses(found.values, batch.reference.label_smoothing).mean()
    return loss, found._replace(values=found.values.detach())


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


def figures(parts: Sequence[Rewards]) -> dict[str, float]:
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


def batch_loss(model: PreTrainedModel, batch: AnyBatch) -> tuple[Tensor, Rewards | None]:
    """Return the loss of a batch, a scalar with a gradient; and the rewards of pairs.

    The loss of text and of samples is in nats per token, the loss of pairs is DPO's.
    """
    if isinstance(batch, PairBatch):
        return dpo_loss(model, batch)
    return language_model_loss(model, *batch), None

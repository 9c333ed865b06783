"""Direct preference optimisation (DPO, arXiv 2305.18290): a loss on pairs of answers.

It needs no model of rewards: a policy's reward for an answer is beta times how much likelier the
answer is than under a reference.
"""

from statistics import fmean

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.data.pairs import AnyBatch, PairBatch, Reference
from coterie.training.loss import language_model_loss, sample_losses


def batch_loss(model: PreTrainedModel, batch: AnyBatch) -> tuple[Tensor, Tensor | None]:
    """The loss that a batch is learnt by, a scalar with a gradient; and the rewards of pairs.

    Of samples it is in nats per token; of pairs, DPO's.
    """
    if isinstance(batch, PairBatch):
        return dpo_loss(model, batch)
    return language_model_loss(model, *batch), None


def dpo_loss(model: PreTrainedModel, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """The mean over pairs of eq. 7, a scalar with a gradient; and the rewards, (n, 2) without.

    An answer's log-likelihood is the sum over its tokens, what ends it included.
    """
    found = rewards(-sample_losses(model, batch.both).view(-1, 2), batch.reference)
    return preference_losses(found, batch.reference.label_smoothing).mean(), found.detach()


def rewards(logprobs: Tensor, reference: Reference) -> Tensor:
    """beta (log pi(y|x) - log pi_ref(y|x)) of log-likelihoods (n, 2), chosen answers first."""
    theirs = reference.logprobs.to(logprobs.dtype).to(logprobs.device)  # not all have float64
    return reference.beta * (logprobs - theirs)


def preference_losses(rewards: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - eps) log sigmoid(h) - eps log sigmoid(-h) of each pair's margin h: (n,).

    Without smoothing it is eq. 7. With it, it is "conservative DPO" (E. Mitchell, "A note on DPO
    with noisy preferences and relationship to IPO", 2023): eps is the share of pairs that are the
    wrong way round.
    """
    h, eps = rewards[:, 0] - rewards[:, 1], label_smoothing
    return -(1 - eps) * F.logsigmoid(h) - eps * F.logsigmoid(-h)


def preferred(margins: Tensor) -> Tensor:
    """1 where the chosen answer has the higher reward, 0 where the rejected one has; half where
    both have the same, as every pair under the reference: (n,)."""
    return (1 + margins.sign()) / 2


def figures(parts: list[Tensor]) -> dict[str, float]:
    """What a step's rewards are, as means over its pairs; `parts`: of its pieces, each (n, 2)."""
    chosen, rejected = torch.cat(parts).cpu().double().unbind(1)
    return {
        "chosen": fmean(chosen.tolist()),
        "rejected": fmean(rejected.tolist()),
        "margin": fmean((chosen - rejected).tolist()),
        "accuracy": fmean(preferred(chosen - rejected).tolist()),
    }

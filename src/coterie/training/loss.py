"""The language-model loss, without ever holding all logits.

With a frozen output head the gradient at the hidden states is known as soon as a token's logits
are: (softmax - one-hot) times the head's weight. So logits are made, used for loss and gradient,
and dropped, a few tokens at a time; a batch of 8 x 128 tokens and GPT-2's vocabulary would
otherwise need 200 MB for each copy of the float32 logits.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters.bases import working_dtype
from coterie.training.precision import frozen_weight

LOGITS_AT_ONCE = 7_000_000
"""Largest number of logits made at a time: 28 MB in float32, so that they stay in cache."""


def language_model_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: a scalar with a gradient.

    ids: (batch, time + 1); tokens 0 .. time-1 are read, 1 .. time predicted.
    """
    head = _plain_frozen_head(model)
    if head is None:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(_at_least_float(logits).flatten(0, 1), ids[:, 1:].flatten())
    hidden = _hidden(model, ids)
    loss = _HeadLoss.apply(hidden, frozen_weight(head, hidden.dtype), ids[:, 1:].flatten())
    assert isinstance(loss, Tensor)
    return loss


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Negative log-likelihood of every token: (batch, time) float32, in nats, no gradient.

    ids: (batch, time + 1), as for `language_model_loss`.
    """
    targets = ids[:, 1:]
    head = _plain_frozen_head(model)
    if head is None:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(
            _at_least_float(logits).flatten(0, 1), targets.flatten(), reduction="none"
        )
    else:
        hidden = _hidden(model, ids)
        losses, _ = _losses(hidden, frozen_weight(head, hidden.dtype), targets.flatten(), False)
    return losses.view(targets.shape).float()


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of (tokens, dim) hidden states through a frozen (vocabulary, dim) head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        losses, grad = _losses(hidden, weight, targets, ctx.needs_input_grad[0])
        ctx.save_for_backward(grad)
        return losses.mean()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * (grads[0] / len(grad))).to(grad.dtype), None, None


def _losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Each token's loss and, if wanted, its gradient at that token's hidden state."""
    losses, grads = [], []
    pieces = min(len(hidden), ceil(len(hidden) * len(weight) / LOGITS_AT_ONCE))
    split = zip(hidden.tensor_split(pieces), targets[:, None].tensor_split(pieces), strict=True)
    for h, target in split:
        logits = _at_least_float(h @ weight.t())
        p = logits.softmax(-1)
        # log-sum-exp from the likeliest token, whose probability is at least 1/vocabulary.
        lse = logits.amax(-1) - p.amax(-1).log()
        losses.append(lse - logits.gather(1, target).squeeze(1))
        if with_grad:
            p.scatter_add_(1, target, p.new_full(target.shape, -1.0))
            grads.append(p.to(weight.dtype) @ weight)
    return torch.cat(losses), torch.cat(grads) if with_grad else None


def _hidden(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Hidden states that enter the output head, (tokens, dim), in the dtype the head works in."""
    decoder = model.get_decoder()
    hidden = decoder(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return hidden.flatten(0, 1).to(working_dtype(hidden))


def _plain_frozen_head(model: PreTrainedModel) -> nn.Linear | None:
    """The output head, unless it is trained or logits are more than `W h` (a bias, a cap)."""
    head = model.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and head.bias is None and not head.weight.requires_grad
    config = model.config.get_text_config()
    changed = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return head if plain and not any(getattr(config, name, None) for name in changed) else None


def _at_least_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()

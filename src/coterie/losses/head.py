"""Losses of a frozen output head's predictions, computed for a few tokens at a time.

If the output head is frozen, the gradient with respect to a token's hidden state follows directly
from the token's logits: it is (softmax - one-hot) times the head's weight, or, for soft targets,
(softmax - probabilities) times the head's weight. Logits are therefore computed for a few tokens at
a time, used for the loss and the gradient, and discarded. Logits of a whole batch of 8 x 128 tokens
would take 200 MB per float32 copy with GPT-2's vocabulary.
"""

from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGITS_AT_ONCE = {"cpu": 24_000_000, "cuda": 64_000_000}
"""The largest number of logits computed at once on each device type (24 million take 96 MB)."""

COPIES = 8
"""The number of tensors of the logits' size that a divergence needs at once."""


class HeadLosses(torch.autograd.Function):
    """The cross-entropy between soft targets and the predictions of a frozen output head.

    The inputs are hidden states shaped (tokens, dim), the head's weight shaped (vocabulary, dim),
    and targets and probabilities, both shaped (tokens, k). The output is shaped (tokens,).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, probs: Tensor) -> Tensor:
        losses, grad = _losses(hidden, weight, targets, probs, ctx.needs_input_grad[0])
        ctx.save_for_backward(grad)
        return losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0][:, None]).to(grad.dtype), None, None, None


def _losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, probs: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute each token's loss and, if `with_grad`, the gradient with respect to `hidden`."""
    losses, grads = [], []
    count = pieces(hidden, weight)
    # All pieces share three buffers: allocating memory of this size costs more than the arithmetic.
    product = hidden.new_empty(ceil(len(hidden) / count), len(weight))
    logits = at_least_float(product)
    p = torch.empty_like(logits)
    probs = probs.to(p.dtype)
    split = zip(*(t.tensor_split(count) for t in (hidden, targets, probs)), strict=True)
    for h, target, prob in split:
        n = len(h)
        torch.mm(h, weight.t(), out=product[:n])
        if logits is not product:
            logits[:n].copy_(product[:n])
        torch.softmax(logits[:n], -1, out=p[:n])
        # Log-sum-exp from the most likely token, whose probability is at least 1 / vocabulary.
        lse = logits[:n].amax(-1) - p[:n].amax(-1).log()
        losses.append(lse - (logits[:n].gather(1, target) * prob).sum(1))
        if with_grad:
            p[:n].scatter_add_(1, target, -prob)
            rounded = p[:n] if logits is product else product[:n].copy_(p[:n])
            grads.append(rounded @ weight)
    return torch.cat(losses), torch.cat(grads) if with_grad else None


class HeadDivergences(torch.autograd.Function):
    """The Kullback-Leibler divergence of a frozen output head's predictions from earlier ones.

    Both predictions are made with the same head. The inputs are the hidden states from which they
    are made, both shaped (tokens, dim) (first the model's, then the earlier ones), and the head's
    weight shaped (vocabulary, dim). The output is shaped (tokens,). The gradient with respect to
    the model's hidden states is (softmax of the model - earlier softmax) times the head's weight.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, earlier: Tensor, weight: Tensor) -> Tensor:
        divergences, grads = [], []
        count = min(len(hidden), COPIES * pieces(hidden, weight))
        for states in zip(hidden.tensor_split(count), earlier.tensor_split(count), strict=True):
            logits = (at_least_float(h @ weight.t()) for h in states)
            own, target = (values.log_softmax(-1) for values in logits)
            divergences.append(divergence(target, own))
            if ctx.needs_input_grad[0]:
                grads.append((own.exp() - target.exp()).to(weight.dtype) @ weight)
        if grads:
            ctx.save_for_backward(torch.cat(grads))
        return torch.cat(divergences)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0][:, None]).to(grad.dtype), None, None


def divergence(target: Tensor, own: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence KL(target || own) of each token's prediction, in nats.

    Args:
        target: Log-probabilities shaped (tokens, vocabulary).
        own: Log-probabilities of the same shape.

    Returns:
        A tensor shaped (tokens,).
    """
    return F.kl_div(own, target, reduction="none", log_target=True).sum(-1)


def pieces(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of pieces into which to split the computation of the logits."""
    at_once = LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE["cuda"])
    return min(len(hidden), ceil(len(hidden) * len(weight) / at_once))


def at_least_float(logits: Tensor) -> Tensor:
    """Return logits in float32, unless they are in float64."""
    return logits if logits.dtype == torch.float64 else logits.float()

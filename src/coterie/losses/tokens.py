"""The language-model loss, without ever holding all logits.

With a frozen output head the gradient at the hidden states is known as soon as a token's logits
are: (softmax - one-hot) times the head's weight; or, where the target is soft, probabilities of
several tokens, (softmax - probabilities). So logits are made, used for loss and gradient, and
dropped, a few tokens at a time; a batch of 8 x 128 tokens and GPT-2's vocabulary would otherwise
need 200 MB for each copy of the float32 logits.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.bases.padding import real_tokens
from coterie.bases.precision import frozen_weight
from coterie.bases.sites import decoder_of, working_dtype

LOGITS_AT_ONCE = {"cpu": 24_000_000, "cuda": 64_000_000}
"""Largest number of logits made at a time; 24 million are 96 MB in float32."""

PIECE_PRICE = {"cpu": 50, "cuda": 1000}
"""Padding tokens that are rather read than one more piece of a batch, whose every operation has a
cost of its own."""


class Batch(NamedTuple):
    """What a loss is taken of; tokens 0 .. time-1 are read, 1 .. time predicted."""

    ids: Tensor
    """(batch, time + 1) int64"""
    counted: Tensor | None = None
    """Which of ids[:, 1:] the loss counts, (batch, time) bool; None: all."""
    real: Tensor | None = None
    """Which of ids[:, :-1] are no padding, (batch, time) bool; None: all."""

    @property
    def terms(self) -> int:
        """Of how many terms the loss is the mean: tokens."""
        return self.ids[:, 1:].numel() if self.counted is None else int(self.counted.sum())

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self._make(None if part is None else part.to(device) for part in self)

    def by_length(self) -> Self:
        """The same samples, the shortest first; as they are where nothing is padding."""
        return self if self.real is None else self.only(self.real.sum(1).argsort(stable=True))

    def alike(self, price: int) -> Iterator[tuple[Tensor, Self]]:
        """The same in pieces of similar lengths, each cut to its longest sample: the samples'
        numbers, and the piece.

        What all pieces read, padding included, and `price` tokens for each are least together. A
        batch without masks is one piece.
        """
        everything = torch.arange(len(self.ids), device=self.ids.device)
        if self.counted is None or self.real is None:
            yield everything, self
            return
        lengths, order = self.real.sum(1).sort(stable=True)
        longest = lengths.tolist()
        ends = _ends(longest, price)
        if len(ends) == 1:
            order = everything
        for start, end in zip([0, *ends], ends, strict=False):
            rows, time = order[start:end], longest[end - 1]
            counted, real = self.counted[rows, :time], self.real[rows, :time]
            yield rows, type(self)(self.ids[rows, : time + 1], counted, real)

    def only(self, rows: Tensor | slice) -> Self:
        """Some of the samples, by their numbers."""
        return self._make(None if part is None else part[rows] for part in self)

    def split(self, size: int) -> Iterator[Self]:
        """The same in batches of at most `size`."""
        for start in range(0, len(self.ids), size):
            yield self.only(slice(start, start + size))

    def loss(self, model: PreTrainedModel) -> "tuple[Tensor, None]":
        """Return the mean cross-entropy in nats per token, a scalar with a gradient."""
        return language_model_loss(model, *self), None

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Return the loss, without a gradient, of samples read `at_once`."""
        losses = [token_losses(model, *part.to(device)).cpu() for part in self.split(at_once)]
        return torch.cat(losses).sum(dtype=torch.float64).item() / self.terms

    @property
    def read(self) -> "Batch":
        """The samples whose tokens a model learns to write: all."""
        return self


def _ends(lengths: Sequence[int], price: int) -> list[int]:
    """Where each piece ends of samples of ascending lengths, so that all pieces cost least."""
    costs, starts = [0], [0]
    for end, length in enumerate(lengths, start=1):
        cost, start = min((costs[s] + (end - s) * length + price, s) for s in range(end))
        costs.append(cost)
        starts.append(start)
    ends = [len(lengths)]
    while starts[ends[0]]:
        ends.insert(0, starts[ends[0]])
    return ends


def language_model_loss(
    model: PreTrainedModel,
    ids: Tensor,
    counted: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy in nats per token: a scalar with a gradient.

    ids: (batch, time + 1); tokens 0 .. time-1 are read, 1 .. time predicted. counted and real are
    masks as in `Batch`; only counted tokens go through the output head.
    """
    return _hard_losses(model, Batch(ids, counted, real)).mean()


def soft_target_loss(
    model: PreTrainedModel,
    batch: Batch,
    targets: Tensor,
    probs: Tensor,
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy to soft targets, in nats per token: a scalar with a gradient.

    For n counted tokens, targets: (n, k) int64; probs: (n, k) float32, which sum to one in each
    row, or a scalar. -sum_j share_j log softmax(logits / temperature)_j takes k logits and their
    log-sum-exp: nothing of size (n, vocabulary) outlives a few tokens. weights: (n,), by which
    each token's loss is multiplied before the mean.
    """
    losses = _soft_target_losses(model, batch, targets, probs, temperature)
    return (losses if weights is None else losses * weights.to(losses.device)).mean()


def sample_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Negative log-likelihood of each sample's counted tokens, in nats: (samples,) with a
    gradient."""
    return _all_losses(model, batch).sum(1)


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    ids: Tensor,
    counted: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Negative log-likelihood of every token: (batch, time) float32, in nats, no gradient.

    Arguments as for `language_model_loss`; 0 where a token is not counted.
    """
    return _all_losses(model, Batch(ids, counted, real)).float()


def _all_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Negative log-likelihood of every token, 0 where it is not counted: (batch, time)."""
    losses = _hard_losses(model, batch)
    if batch.counted is None:
        return losses.view(batch.ids[:, 1:].shape)
    return losses.new_zeros(batch.counted.shape).masked_scatter(batch.counted, losses)


def _hard_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Negative log-likelihood of each counted token, (n,)."""
    targets = _counted(batch.ids[:, 1:].flatten(), batch.counted)[:, None]
    return _soft_target_losses(model, batch, targets, targets.new_ones(()).float())


def _soft_target_losses(
    model: PreTrainedModel, batch: Batch, targets: Tensor, probs: Tensor, temperature: float = 1.0
) -> Tensor:
    """The cross-entropy of each counted token, (n,); see `soft_target_loss`."""
    probs = probs.expand(targets.shape)
    head = _plain_head(model)
    if head is None or (head.weight.requires_grad and torch.is_grad_enabled()):
        logits = _divided(_logits(model, batch), temperature)
        logprobs = F.log_softmax(_at_least_float(logits), -1)
        return -(logprobs.gather(1, targets) * probs).sum(1)
    hidden = _divided(hidden_states(model, batch), temperature)
    weight = frozen_weight(head, hidden.dtype)
    there = weight.device
    losses = _HeadLosses.apply(hidden.to(there), weight, targets.to(there), probs.to(there))
    assert isinstance(losses, Tensor)
    return losses.to(hidden.device)


@torch.no_grad()
def logits_in_pieces(model: PreTrainedModel, batch: Batch) -> Iterator[Tensor]:
    """Logits of the counted tokens, in their order, (some, vocabulary) float32 at a time."""
    head = _plain_head(model)
    if head is None:
        yield _at_least_float(_logits(model, batch))
        return
    hidden = hidden_states(model, batch)
    weight = frozen_weight(head, hidden.dtype)
    for h in hidden.tensor_split(_pieces(hidden, weight)):
        yield _at_least_float(h.to(weight.device) @ weight.t()).to(h.device)


class _HeadLosses(torch.autograd.Function):
    """Cross-entropy, (tokens,), of (tokens, dim) hidden states through a frozen (vocabulary, dim)
    head to probs (tokens, k) of the targets (tokens, k)."""

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
    """Each token's loss and, if wanted, its gradient at that token's hidden state."""
    losses, grads = [], []
    pieces = _pieces(hidden, weight)
    # Three buffers for all pieces: fresh memory of this size costs more than the arithmetic.
    product = hidden.new_empty(ceil(len(hidden) / pieces), len(weight))
    logits = _at_least_float(product)
    p = torch.empty_like(logits)
    probs = probs.to(p.dtype)
    split = zip(*(t.tensor_split(pieces) for t in (hidden, targets, probs)), strict=True)
    for h, target, prob in split:
        n = len(h)
        torch.mm(h, weight.t(), out=product[:n])
        if logits is not product:
            logits[:n].copy_(product[:n])
        torch.softmax(logits[:n], -1, out=p[:n])
        # log-sum-exp from the likeliest token, whose probability is at least 1/vocabulary.
        lse = logits[:n].amax(-1) - p[:n].amax(-1).log()
        losses.append(lse - (logits[:n].gather(1, target) * prob).sum(1))
        if with_grad:
            p[:n].scatter_add_(1, target, -prob)
            rounded = p[:n] if logits is product else product[:n].copy_(p[:n])
            grads.append(rounded @ weight)
    return torch.cat(losses), torch.cat(grads) if with_grad else None


def _pieces(hidden: Tensor, weight: Tensor) -> int:
    """In how many pieces the logits of (tokens, dim) are made."""
    at_once = LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE["cuda"])
    return min(len(hidden), ceil(len(hidden) * len(weight) / at_once))


def _counted(rows: Tensor, counted: Tensor | None) -> Tensor:
    """Of (batch * time, ...) the rows that the loss counts."""
    return rows if counted is None else rows[counted.flatten()]


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Hidden states of the counted tokens that enter the output head, (tokens, dim), in the dtype
    the head works in, where the ids are."""
    decoder = decoder_of(model)

    def states(ids: Tensor) -> Tensor:
        return decoder(input_ids=ids, use_cache=False).last_hidden_state

    hidden = _in_pieces(states, batch)
    return hidden.to(working_dtype(hidden))


def _logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits of the counted tokens, (tokens, vocabulary); a prompt that the model puts first has
    none."""

    def logits(ids: Tensor) -> Tensor:
        time = ids.shape[1]
        return model(input_ids=ids, use_cache=False, logits_to_keep=time).logits[:, -time:]

    return _in_pieces(logits, batch)


def _in_pieces(read: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """What a model makes of the counted tokens, in their order: (tokens, any).

    `read` is of ids (samples, time), to (samples, time, any). Samples of similar lengths are read
    together, so that little is padding.
    """
    numbers = torch.arange(batch.ids[:, 1:].numel(), device=batch.ids.device)
    numbers = numbers.view_as(batch.ids[:, 1:])
    found: list[Tensor] = []
    places: list[Tensor] = []
    price = PIECE_PRICE.get(batch.ids.device.type, PIECE_PRICE["cuda"])
    for rows, piece in batch.alike(price):
        with real_tokens(piece.real, goes_on=bool(found)):
            made = read(piece.ids[:, :-1]).to(batch.ids.device)  # the last layer may be elsewhere
        found.append(_counted(made.flatten(0, 1), piece.counted))
        places.append(_counted(numbers[rows, : made.shape[1]].flatten(), piece.counted))
    return found[0] if len(found) == 1 else torch.cat(found)[torch.cat(places).argsort()]


def _plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The output head, unless logits are more than `W h` of the tokens' own hidden states.

    Some models add a bias, a scale or a cap; a soft prompt (PEFT) stands before the tokens.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    head = model.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and head.bias is None
    config = model.config.get_text_config()
    changed = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return head if plain and not any(getattr(config, name, None) for name in changed) else None


def _divided(values: Tensor, temperature: float) -> Tensor:
    """Without a copy where nothing changes."""
    return values if temperature == 1 else values / temperature


def _at_least_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()

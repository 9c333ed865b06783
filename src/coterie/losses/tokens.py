"""The language-model loss, computed without storing the logits of a whole batch.

If the output head is frozen, the gradient with respect to a token's hidden state follows directly
from the token's logits: it is (softmax - one-hot) times the head's weight, or, for soft targets,
(softmax - probabilities) times the head's weight. Logits are therefore computed for a few tokens at
a time, used for the loss and the gradient, and discarded. Logits of a whole batch of 8 x 128 tokens
would take 200 MB per float32 copy with GPT-2's vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.bases.devices import moved
from coterie.bases.padding import real_tokens
from coterie.bases.precision import frozen_weight
from coterie.bases.sites import decoder_of, working_dtype
from coterie.bases.unpacked import one_sequence_per_row

LOGITS_AT_ONCE = {"cpu": 24_000_000, "cuda": 64_000_000}
"""The largest number of logits computed at once on each device type (24 million take 96 MB)."""
PIECE_COST = {"cpu": 50, "cuda": 1000}
"""The number of padding tokens that cost as much as splitting a batch into one more piece.

Every operation has a fixed cost per piece, so some padding is cheaper than one more piece.
"""


class Batch(NamedTuple):
    """Samples of `time` + 1 tokens each, of which the model predicts all except the first."""

    ids: Tensor
    """The token ids, shaped (batch, time + 1), int64."""
    counted: Tensor | None = None
    """A (batch, time) mask of tokens in ids[:, 1:] that count for the loss; None selects all.

    The mask is on the CPU.
    """
    real: Tensor | None = None
    """A (batch, time) mask of tokens in ids[:, :-1] that are not padding; None selects all.

    The mask is on the CPU.
    """

    @property
    def terms(self) -> int:
        """The number of tokens that count for the loss. The loss is the mean over these tokens."""
        return self.ids[:, 1:].numel() if self.counted is None else int(self.counted.sum())

    def to(self, device: torch.device) -> Self:
        """Return the batch with its token ids on a device.

        The masks stay on the CPU: the number of tokens that they select is needed there.
        """
        return self._replace(ids=moved(self.ids, device))

    def by_length(self) -> Self:
        """Return the samples sorted by ascending length. A batch without padding is unchanged."""
        return self if self.real is None else self.only(self.real.sum(1).argsort(stable=True))

    def pieces(self, cost: int) -> Iterator[tuple[Tensor, Self]]:
        """Split the batch into pieces of samples of similar length.

        Each piece is truncated to the length of its longest sample. The split minimises
        `t + cost * p`, where t is the number of tokens, including padding tokens, and p is the
        number of pieces. If `counted` or `real` is None, the batch is not split.

        Args:
            cost: The fixed cost of computing one piece, expressed as a number of tokens.

        Yields:
            For each piece, the row numbers of its samples in this batch, and the piece itself.
        """
        all_rows = torch.arange(len(self.ids))
        if self.counted is None or self.real is None:
            yield all_rows, self
            return
        lengths, order = self.real.sum(1).sort(stable=True)
        ascending = lengths.tolist()
        ends = _cheapest_ends(ascending, cost)
        if len(ends) == 1:
            order = all_rows
        for start, end in zip([0, *ends], ends, strict=False):
            rows, time = order[start:end], ascending[end - 1]
            piece = self.only(rows)
            assert piece.counted is not None
            assert piece.real is not None
            counted, real = piece.counted[:, :time], piece.real[:, :time]
            yield rows, type(self)(piece.ids[:, : time + 1], counted, real)

    def only(self, rows: Tensor | slice) -> Self:
        """Return a batch of the samples selected by `rows`, which are row numbers or a slice."""
        counted, real = (None if mask is None else mask[rows] for mask in self[1:])
        if isinstance(rows, Tensor):
            rows = moved(rows, self.ids.device)
        return type(self)(self.ids[rows], counted, real)

    def split(self, size: int) -> Iterator[Self]:
        """Split the batch into consecutive batches of at most `size` samples."""
        for start in range(0, len(self.ids), size):
            yield self.only(slice(start, start + size))

    def loss(self, model: PreTrainedModel) -> "tuple[Tensor, None]":
        """Return a pair: the mean cross-entropy in nats per token (differentiable), and None.

        Batches for other losses return metrics, such as the rewards of DPO, as the second item.
        """
        return language_model_loss(model, *self), None

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Compute the mean cross-entropy of the tokens that count for the loss, in nats per token.

        Args:
            model: The model.
            device: The device to which the batch is moved for the forward pass.
            at_once: The number of samples per forward pass.
        """
        losses = [token_losses(model, *part.to(device)).cpu() for part in self.split(at_once)]
        return torch.cat(losses).sum(dtype=torch.float64).item() / self.terms

    @property
    def read(self) -> "Batch":
        """The samples from which, for example, logits are computed: here, the whole batch."""
        return self


def _cheapest_ends(lengths: Sequence[int], piece_cost: int) -> list[int]:
    """Return the end indices of the pieces into which `Batch.pieces` splits sorted samples."""
    costs, starts = [0], [0]
    for end, length in enumerate(lengths, start=1):
        cost, start = min((costs[s] + (end - s) * length + piece_cost, s) for s in range(end))
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
    """Compute the mean cross-entropy of the tokens that count towards the loss.

    The output head computes logits only for these tokens.

    Args:
        model: The model.
        ids: The token ids, shaped (batch, time + 1), int64; see `Batch`.
        counted: A mask of the tokens that count for the loss, as in `Batch`; None selects all.
        real: A mask of the tokens that are not padding, as in `Batch`; None selects all.

    Returns:
        A scalar with a gradient, in nats per token.
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
    """Compute the mean cross-entropy to soft targets.

    The loss of a token is -sum_j probs_j log softmax(logits / temperature)_j. Only the logits of k
    targets and the log-sum-exp of all logits are needed, so no (n, vocabulary) tensor is stored.

    Args:
        model: The model.
        batch: Samples with n tokens that count towards the loss.
        targets: The k target tokens for each of the n tokens, shaped (n, k), int64.
        probs: The probability of each target, shaped (n, k), float32, where each row sums to 1. If
            `probs` is a scalar, every target has this probability.
        temperature: The divisor of the model's logits.
        weights: Factors shaped (n,), applied to the losses before the mean; None applies none.

    Returns:
        A scalar with a gradient, in nats per token.
    """
    losses = _soft_target_losses(model, batch, targets, probs, temperature)
    return (losses if weights is None else losses * weights.to(losses.device)).mean()


def sample_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Compute each sample's negative log-likelihood in nats, with a gradient.

    The result is shaped (samples,). Each value is a sum over the tokens that count for the loss.
    """
    return _all_losses(model, batch).sum(1)


@torch.no_grad()
def token_losses(
    model: PreTrainedModel,
    ids: Tensor,
    counted: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:
    """Compute each token's negative log-likelihood, without a gradient.

    Args:
        model: The model.
        ids: The token ids, shaped (batch, time + 1), int64; see `Batch`.
        counted: A mask of the tokens that count for the loss, as in `Batch`; None selects all.
        real: A mask of the tokens that are not padding, as in `Batch`; None selects all.

    Returns:
        A float32 tensor shaped (batch, time), in nats, with 0 for tokens that do not count.
    """
    return _all_losses(model, Batch(ids, counted, real)).float()


def _all_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return losses shaped (batch, time), with 0 for the tokens where `counted` is False."""
    losses = _hard_losses(model, batch)
    if batch.counted is None:
        return losses.view(batch.ids[:, 1:].shape)
    mask = moved(batch.counted, losses.device)
    return losses.new_zeros(mask.shape).masked_scatter(mask, losses)


def _hard_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return losses shaped (n,), one for each of the n tokens that count for the loss."""
    targets = _select_counted(batch.ids[:, 1:].flatten(), batch.counted)[:, None]
    return _soft_target_losses(model, batch, targets, targets.new_ones(()).float())


def _soft_target_losses(
    model: PreTrainedModel, batch: Batch, targets: Tensor, probs: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return cross-entropies shaped (n,); `soft_target_loss` explains the arguments."""
    probs = probs.expand(targets.shape)
    head = _plain_head(model)
    if head is None or (head.weight.requires_grad and torch.is_grad_enabled()):
        logits = _divided(_logits(model, batch), temperature)
        logprobs = F.log_softmax(_at_least_float(logits), -1)
        return -(logprobs.gather(1, targets) * probs).sum(1)
    hidden = _divided(hidden_states(model, batch), temperature)
    weight = frozen_weight(head, hidden.dtype)
    device = weight.device
    losses = _HeadLosses.apply(hidden.to(device), weight, targets.to(device), probs.to(device))
    assert isinstance(losses, Tensor)
    return losses.to(hidden.device)


@torch.no_grad()
def logits_in_pieces(model: PreTrainedModel, batch: Batch) -> Iterator[Tensor]:
    """Compute the logits for the tokens that count for the loss, in pieces, without a gradient.

    Args:
        model: The model.
        batch: The samples.

    Yields:
        The logits for consecutive tokens, shaped (tokens, vocabulary), in float32 or float64.
    """
    head = _plain_head(model)
    if head is None:
        yield _at_least_float(_logits(model, batch))
        return
    hidden = hidden_states(model, batch)
    weight = frozen_weight(head, hidden.dtype)
    for h in hidden.tensor_split(_pieces(hidden, weight)):
        yield _at_least_float(h.to(weight.device) @ weight.t()).to(h.device)


class _HeadLosses(torch.autograd.Function):
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
    pieces = _pieces(hidden, weight)
    # All pieces share three buffers: allocating memory of this size costs more than the arithmetic.
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
        # Log-sum-exp from the most likely token, whose probability is at least 1 / vocabulary.
        lse = logits[:n].amax(-1) - p[:n].amax(-1).log()
        losses.append(lse - (logits[:n].gather(1, target) * prob).sum(1))
        if with_grad:
            p[:n].scatter_add_(1, target, -prob)
            rounded = p[:n] if logits is product else product[:n].copy_(p[:n])
            grads.append(rounded @ weight)
    return torch.cat(losses), torch.cat(grads) if with_grad else None


def _pieces(hidden: Tensor, weight: Tensor) -> int:
    """Return the number of pieces into which to split the computation of the logits."""
    at_once = LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE["cuda"])
    return min(len(hidden), ceil(len(hidden) * len(weight) / at_once))


def _select_counted(rows: Tensor, counted: Tensor | None) -> Tensor:
    """Select the rows of a (batch * time, ...) tensor where `counted` is True; None selects all.

    The selection is by number: with a mask, a GPU would have to report the number of rows.
    """
    if counted is None:
        return rows
    return rows[moved(counted.flatten().nonzero()[:, 0], rows.device)]


def hidden_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Compute the hidden states from which the head predicts the tokens that count for the loss.

    Args:
        model: The model.
        batch: The samples.

    Returns:
        States shaped (tokens, dim), in the head's working dtype, on the device of `batch.ids`.
    """
    decoder = decoder_of(model)

    def states(ids: Tensor) -> Tensor:
        return decoder(input_ids=ids, use_cache=False).last_hidden_state

    hidden = _in_pieces(states, batch)
    return hidden.to(working_dtype(hidden))


def _logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the logits for the tokens that count for the loss, shaped (tokens, vocabulary).

    If the model puts a soft prompt before the tokens, logits at the prompt's positions are omitted.
    """

    def logits(ids: Tensor) -> Tensor:
        time = ids.shape[1]
        return model(input_ids=ids, use_cache=False, logits_to_keep=time).logits[:, -time:]

    return _in_pieces(logits, batch)


def _in_pieces(compute: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Apply a function to a batch in pieces of samples of similar length, to reduce padding.

    Args:
        compute: A function of ids shaped (samples, time) that returns (samples, time, dim) values.
        batch: The samples.

    Returns:
        Values shaped (tokens, dim) for the tokens that count for the loss, in the batch's order.
    """
    numbers = torch.arange(batch.ids[:, 1:].numel()).view(batch.ids[:, 1:].shape)
    parts: list[Tensor] = []
    places: list[Tensor] = []
    cost = PIECE_COST.get(batch.ids.device.type, PIECE_COST["cuda"])
    for rows, piece in batch.pieces(cost):
        with real_tokens(piece.real, goes_on=bool(parts)), one_sequence_per_row():
            values = compute(piece.ids[:, :-1])
        values = values.to(batch.ids.device)  # the last layer may be on another device
        parts.append(_select_counted(values.flatten(0, 1), piece.counted))
        places.append(_select_counted(numbers[rows, : values.shape[1]].flatten(), piece.counted))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)[moved(torch.cat(places).argsort(), batch.ids.device)]


def _plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the output head if the logits are exactly the head's weight times the hidden state.

    Return None for models that scale or cap the logits, or add a bias to the logits. Also return
    None for PEFT models, because they may place a soft prompt before the tokens.
    """
    if not isinstance(model, PreTrainedModel):
        return None
    head = model.get_output_embeddings()
    plain = isinstance(head, nn.Linear) and head.bias is None
    config = model.config.get_text_config()
    modifiers = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    return head if plain and not any(getattr(config, name, None) for name in modifiers) else None


def _divided(values: Tensor, temperature: float) -> Tensor:
    """Divide values by a temperature, without copying the values if the temperature is 1."""
    return values if temperature == 1 else values / temperature


def _at_least_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()

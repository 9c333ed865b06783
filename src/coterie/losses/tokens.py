"""The language-model loss, computed without storing the logits of a batch; see losses/head.py."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from coterie.bases.devices import moved
from coterie.bases.padding import real_tokens
from coterie.bases.precision import frozen_weight
from coterie.bases.sites import decoder_of, working_dtype
from coterie.bases.unpacked import one_sequence_per_row
from coterie.losses.head import HeadDivergences, HeadLosses, at_least_float, divergence, pieces

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

        The masks stay on the CPU, where the number of tokens that they select is needed.
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


def divergences(model: PreTrainedModel, batch: Batch, earlier: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence of a model's predictions from its base's predictions.

    Args:
        model: The base with an adapter.
        batch: Samples with n tokens that count.
        earlier: The base's hidden states for these tokens, shaped (n, dim), if
            `predicts_from_states(model)` is true. Otherwise, the base's log-probabilities for these
            tokens, shaped (n, vocabulary).

    Returns:
        KL(base || model) for each token in nats, with a gradient, shaped (n,).
    """
    head = _frozen_head(model)
    if head is None:
        return divergence(earlier, at_least_float(_logits(model, batch)).log_softmax(-1))
    hidden = hidden_states(model, batch)
    weight = frozen_weight(head, hidden.dtype)
    own, target = (states.to(weight.device, weight.dtype) for states in (hidden, earlier))
    result: Any = HeadDivergences.apply(own, target, weight)
    return result.to(hidden.device)


def predicts_from_states(model: PreTrainedModel) -> bool:
    """Return whether the logits are a frozen weight times the hidden states, and nothing else."""
    return _frozen_head(model) is not None


def _frozen_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the result of `_plain_head`, or None if an adapter changes the head's weight."""
    head = _plain_head(model)
    return None if head is None or parametrize.is_parametrized(head) else head


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Compute log-probabilities for the n tokens that count, shaped (n, vocabulary)."""
    return torch.cat([logits.log_softmax(-1) for logits in logits_in_pieces(model, batch)])


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
        logprobs = F.log_softmax(at_least_float(logits), -1)
        return -(logprobs.gather(1, targets) * probs).sum(1)
    hidden = _divided(hidden_states(model, batch), temperature)
    weight = frozen_weight(head, hidden.dtype)
    device = weight.device
    losses = HeadLosses.apply(hidden.to(device), weight, targets.to(device), probs.to(device))
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
        yield at_least_float(_logits(model, batch))
        return
    hidden = hidden_states(model, batch)
    weight = frozen_weight(head, hidden.dtype)
    for h in hidden.tensor_split(pieces(hidden, weight)):
        yield at_least_float(h.to(weight.device) @ weight.t()).to(h.device)


def _select_counted(rows: Tensor, counted: Tensor | None) -> Tensor:
    """Select the rows of a (batch * time, ...) tensor where `counted` is True; None selects all.

    Rows are selected by index, because indexing with a mask synchronises a GPU.
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

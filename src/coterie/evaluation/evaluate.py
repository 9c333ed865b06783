"""Exact evaluation, in which a model predicts every token or answer of a split once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.data.measured import WORST, Measured
from coterie.data.split import AnyBatch, Scored
from coterie.evaluation.answers import answer_losses
from coterie.evaluation.gate import Gate, answered, gated_answers
from coterie.evaluation.metrics import METRICS, metric_named
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.losses.tokens import Batch, logits_in_pieces, token_losses
from coterie.messages.host import copied_to_host


@dataclass(frozen=True)
class Score:
    """A model's scores on a split.

    The split consists of n items: samples, pairs of answers, or windows of a stream of text. A
    sample is a prompt with its answer, or a conversation. The predicted text is the whole stream,
    the answers of the samples, or the chosen answers of the pairs. The tokens that end answers are
    part of the predicted text.
    """

    item_nats: Tensor
    """The negative log-likelihood of each item's predicted text, in nats.

    The tensor is float64 and shaped (n,).
    """
    item_tokens: Tensor
    """The number of predicted tokens of each item, as an int64 tensor shaped (n,)."""
    bytes: int
    """The number of UTF-8 bytes of all predicted text."""
    shares: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """For each metric, the score of each item, or None for an item without a score."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The other entries of a report, such as the number of items, and means over the items."""
    learnt: float | None = None
    """The mean training loss, or None if the training loss is the cross-entropy of tokens."""

    @property
    def nats(self) -> float:
        """The negative log-likelihood of all predicted text, in nats."""
        return self.item_nats.sum().item()

    @property
    def tokens(self) -> int:
        """The number of predicted tokens."""
        return int(self.item_tokens.sum())

    @property
    def loss(self) -> float:
        """The mean loss per token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss per token.

        Perplexities are comparable only between models with the same tokenizer.
        """
        return math.exp(min(self.loss, WORST))

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits per UTF-8 byte of text, which is comparable between any two models."""
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, float]:
        """Return the entries of this score, as they appear in a report and in result.json."""
        return {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "loss": self.loss,
            "tokens": self.tokens,
            "bytes": self.bytes,
            **self.figures,
        }

    def items(self) -> dict[str, list[Any]]:
        """Return the values of all items, as one list per key.

        The keys are `nats`, `tokens` and the names of the metrics.
        """
        figures = {"nats": self.item_nats.tolist(), "tokens": self.item_tokens.tolist()}
        return figures | {name: list(values) for name, values in self.shares.items()}


@dataclass(frozen=True)
class ModelScorer:
    """A model to evaluate, with the window and the batch size to use."""

    base: Base
    model: PreTrainedModel
    window: int
    """The maximum length of a sample, or of a window of a stream of text, in predicted tokens."""
    batch: int
    """The number of windows, samples or pairs per forward pass."""
    generate: int | None = None
    """The maximum number of tokens of a generated answer, or None to generate no answers."""
    gate: Gate | None = None
    """The client's gate; None if the model answers all prompts."""

    def losses(self, rows: Examples, batch: int) -> Tensor:
        """Return the total loss of each row, in nats, over the tokens of the row's answers.

        Args:
            rows: The tokenised samples. A row is a prompt with its answer, or a conversation.
            batch: The number of rows per forward pass, used instead of the attribute `batch`.

        Returns:
            A float64 tensor with one loss per row, shaped (rows,).
        """

        def losses(model: PreTrainedModel, part: Examples) -> list[Tensor]:
            return list(answer_losses(self.base, model, part, batch))

        return torch.stack(answered(self.gate, self.base, self.model, rows, losses))

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each token in nats, as a float32 tensor shaped (batch, time)."""
        with autocast(self.base.precision, self.base.device.type):
            return token_losses(self.model, *batch.to(self.base.device)).cpu()

    def texts(self, rows: Examples) -> Sequence[str]:
        """Return the generated answer to each row's prompt, or () if generation is off."""
        if self.generate is None:
            return ()
        return gated_answers(self.gate, self.base, self.model, rows, self.generate, self.batch)


def evaluate(
    base: Base,
    model: PreTrainedModel,
    tokens: Scored,
    window: int,
    batch: int = 16,
    generate: int | None = None,
    metric: str | None = None,
    gate: Gate | None = None,
) -> Score:
    """Score a model on a split. The cross-entropy is computed in float32.

    Args:
        base: The base of the model.
        model: The model, which is the base with an adapter, or the base alone.
        tokens: The tokenised split to score, usually the validation split or the test split.
        window: The maximum length of a sample, or of a window of a stream of text. The length is
            the number of predicted tokens.
        batch: The number of windows, samples or pairs per forward pass.
        generate: The maximum number of tokens of a generated answer, or None to generate no
            answers.
        metric: The name of a metric to compute in addition to the built-in metrics.
        gate: The client's gate; None if the model answers all prompts. Windows of a stream of text
            have no prompts.

    Returns:
        The losses, and the values of all metrics whose input is available.
    """
    measured, counts = tokens.measured(ModelScorer(base, model, window, batch, generate, gate))
    shares = _shares(measured, metric)
    means = {name: fmean(v for v in values if v is not None) for name, values in shares.items()}
    figures = {**counts, **means}
    return Score(measured.nats, measured.tokens, tokens.bytes, shares, figures, measured.loss)


def _shares(measured: Measured, extra: str | None) -> dict[str, Sequence[float | None]]:
    """Return the scores of all items for each built-in metric and, if given, the metric `extra`.

    Perplexity is left out, because every `Score` computes it. A metric is also left out if
    `measured` does not contain the metric's input, or if no item has a score.
    """
    names: list[str] = [*METRICS.builtin, *([] if extra in (None, *METRICS.builtin) else [extra])]
    # Every `Score` computes perplexity itself.
    metrics = [metric_named(name) for name in names if name != PERPLEXITY.name]
    by_metric = {m.name: m.score(measured) for m in metrics if measured.offers(m.needs)}
    return {name: scores for name, scores in by_metric.items() if set(scores) != {None}}


@torch.no_grad()
def mean_loss(base: Base, model: PreTrainedModel, batch: AnyBatch, at_once: int) -> float:
    """Return a model's mean loss on a batch.

    For windows of a stream of text and for samples with one answer, the loss is the cross-entropy,
    and the mean is over the tokens that count for the loss. For prompts with several answers, such
    as preference pairs, the loss is a preference loss, such as the DPO loss, and the mean is over
    the prompts.

    Args:
        base: The base of the model.
        model: The model.
        batch: Windows of a stream of text, samples with one answer, or prompts with several
            answers.
        at_once: The number of samples per forward pass.
    """
    with autocast(base.precision, base.device.type):
        return batch.mean_loss(model, base.device, at_once)


@torch.no_grad()
def top_logits(base: Base, batch: Batch, k: int, at_once: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits after the last input token of each sample.

    Args:
        base: The base whose model computes the logits.
        batch: Samples, with or without padding.
        k: The number of logits per sample.
        at_once: The number of samples per forward pass.

    Returns:
        The logits, and the token ids of the logits. Both tensors are shaped (samples, k) and sorted
        by token id.
    """
    logits_and_ids = []
    with autocast(base.precision, base.device.type):
        for part in batch.to(base.device).split(at_once):
            for logits in logits_in_pieces(base.model, part._replace(counted=_last(part))):
                ids = logits.topk(k).indices.sort().values
                logits_and_ids.append(copied_to_host([logits.gather(-1, ids).float(), ids]))
    values, ids = zip(*logits_and_ids, strict=True)
    return torch.cat(values), torch.cat(ids)


def _last(batch: Batch) -> Tensor:
    """Return a mask of each sample's last input token, as a bool tensor shaped (batch, time)."""
    everything = torch.ones(batch.ids[:, 1:].shape, dtype=torch.bool)
    real = everything if batch.real is None else batch.real
    return real & (real.cumsum(1) == real.sum(1, keepdim=True))

"""Exact evaluation: every token of a split, or every answer, is predicted once."""

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
from coterie.evaluation.generation import generate_answers
from coterie.evaluation.metrics import METRICS, metric_named
from coterie.evaluation.perplexity import PERPLEXITY
from coterie.losses.tokens import Batch, logits_in_pieces, token_losses


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text by windows, or answers: of samples, or the chosen of pairs.

    These are its items. Losses are of answers with the tokens that end them.
    """

    item_nats: Tensor
    """Negative log-likelihood of each: (n,) float64."""
    item_tokens: Tensor
    """Tokens that each has: (n,) int64."""
    bytes: int
    """UTF-8 bytes of the whole text."""
    shares: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """The scores of items by metric; None where an item has no score."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """The other entries of reports: how many items, and means over them."""
    learnt: float | None = None
    """The mean of the loss that is learnt, where it is none of single tokens."""

    @property
    def nats(self) -> float:
        """Negative log-likelihood of the whole text."""
        return self.item_nats.sum().item()

    @property
    def tokens(self) -> int:
        """Tokens of the whole text."""
        return int(self.item_tokens.sum())

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token); comparable between models with the same tokenizer only."""
        return math.exp(min(self.loss, WORST))

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte of text; comparable between any two models."""
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, float]:
        """For reports."""
        return {
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "loss": self.loss,
            "tokens": self.tokens,
            "bytes": self.bytes,
            **self.figures,
        }

    def items(self) -> dict[str, list[Any]]:
        """The same by item: lists as long as there are items."""
        figures = {"nats": self.item_nats.tolist(), "tokens": self.item_tokens.tolist()}
        return figures | {name: list(values) for name, values in self.shares.items()}


@dataclass(frozen=True)
class ModelScorer:
    """A model (a base, with whatever is attached) that is scored on a held-out text."""

    base: Base
    model: PreTrainedModel
    window: int
    batch: int
    generate: int | None = None
    """Tokens of an answer that is generated at most; None: none is generated."""

    def losses(self, rows: Examples, batch: int) -> Tensor:
        """Return the loss of each row's answers: (rows,) float64, in nats."""
        return answer_losses(self.base, self.model, rows, batch)

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each token: (batch, time) float32, in nats."""
        with autocast(self.base.precision, self.base.device.type):
            return token_losses(self.model, *batch.to(self.base.device)).cpu()

    def texts(self, rows: Examples) -> Sequence[str]:
        """Return the answer that the model generates to each row, if any are asked for."""
        if self.generate is None:
            return ()
        return generate_answers(self.base, self.model, rows, self.generate, self.batch)


def evaluate(
    base: Base,
    model: PreTrainedModel,
    tokens: Scored,
    window: int,
    batch: int = 16,
    generate: int | None = None,
    metric: str | None = None,
) -> Score:
    """Score a model (the base, with whatever is attached) on a text, on prompts or on pairs.

    The cross-entropy is in fp32.

    Args:
        base: The base of the model.
        model: The model.
        tokens: A held-out text.
        window: Tokens that a window or a sample predicts at most.
        batch: Windows, samples or pairs that are scored at once.
        generate: Tokens of an answer that is generated to a prompt; None: none is generated.
        metric: A metric to compute besides the package's own.
    """
    measured, counts = tokens.measured(ModelScorer(base, model, window, batch, generate))
    shares = _shares(measured, metric)
    means = {name: fmean(v for v in values if v is not None) for name, values in shares.items()}
    figures = {**counts, **means}
    return Score(
        measured.nats, measured.tokens, tokens.bytes, shares, figures, learnt=measured.loss
    )


def _shares(measured: Measured, asked: str | None) -> dict[str, Sequence[float | None]]:
    """Return the scores of items by metric, of those that what was measured allows."""
    names: list[str] = [*METRICS.builtin, *([] if asked in (None, *METRICS.builtin) else [asked])]
    metrics = [metric_named(name) for name in names if name != PERPLEXITY.name]  # always scored
    found = {m.name: m.score(measured) for m in metrics if measured.offers(m.needs)}
    return {name: scores for name, scores in found.items() if set(scores) != {None}}


@torch.no_grad()
def mean_loss(base: Base, model: PreTrainedModel, batch: AnyBatch, at_once: int) -> float:
    """Return the mean of a model's loss over the terms of a batch, such as nats per token.

    Args:
        base: The base of the model.
        model: The model.
        batch: Samples of any kind.
        at_once: Samples that are read at once.
    """
    with autocast(base.precision, base.device.type):
        return batch.mean_loss(model, base.device, at_once)


@torch.no_grad()
def top_logits(base: Base, batch: Batch, k: int, at_once: int) -> tuple[Tensor, Tensor]:
    """The k largest logits after the last token that is read of each sample: values and places,
    (samples, k), places ascending. So many samples are read at once."""
    found = []
    with autocast(base.precision, base.device.type):
        for part in batch.to(base.device).split(at_once):
            for logits in logits_in_pieces(base.model, part._replace(counted=_last(part))):
                places = logits.topk(k).indices.sort().values
                found.append((logits.gather(-1, places).float().cpu(), places.cpu()))
    values, places = zip(*found, strict=True)
    return torch.cat(values), torch.cat(places)


def _last(batch: Batch) -> Tensor:
    """Which token is the last that is read of each sample: (batch, time) bool."""
    read = torch.ones_like(batch.ids[:, 1:], dtype=torch.bool) if batch.real is None else batch.real
    return read & (read.cumsum(1) == read.sum(1, keepdim=True))

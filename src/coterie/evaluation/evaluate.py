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
from coterie.data.batch import Batch
from coterie.data.examples import Examples
from coterie.data.kinds.preferences import AnyBatch, PairBatch, Pairs
from coterie.data.kinds.text import Tokens
from coterie.data.tokens import Split
from coterie.data.windows import evaluation_windows
from coterie.evaluation.answers import answer_losses, finite, pair_logprobs, with_choices
from coterie.evaluation.generation import generate_answers
from coterie.evaluation.metrics import METRICS, Choices, Measured, metric_named
from coterie.evaluation.perplexity import PERPLEXITY, WORST
from coterie.losses.preferences import dpo_loss, preference_losses, rewards
from coterie.losses.tokens import logits_in_pieces, token_losses


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


def evaluate(
    base: Base,
    model: PreTrainedModel,
    tokens: Split,
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
    if isinstance(tokens, Examples):
        measured, counts = _answers(base, model, tokens, window, batch, generate)
        size = tokens.bytes
    elif isinstance(tokens, Pairs):
        measured, counts = _pairs(base, model, tokens, batch)
        size = tokens.chosen.bytes
    else:
        measured, counts = _text(base, model, tokens, window, batch), {}
        size = tokens.bytes
    shares = _shares(measured, metric)
    means = {name: fmean(v for v in values if v is not None) for name, values in shares.items()}
    return Score(measured.nats, measured.tokens, size, shares, {**counts, **means})


def _shares(measured: Measured, asked: str | None) -> dict[str, Sequence[float | None]]:
    """Return the scores of items by metric, of those that what was measured allows."""
    names: list[str] = [*METRICS.builtin, *([] if asked in (None, *METRICS.builtin) else [asked])]
    metrics = [metric_named(name) for name in names if name != PERPLEXITY.name]  # always scored
    found = {m.name: m.score(measured) for m in metrics if measured.offers(m.needs)}
    return {name: scores for name, scores in found.items() if set(scores) != {None}}


@torch.no_grad()
def _text(base: Base, model: PreTrainedModel, tokens: Tokens, window: int, batch: int) -> Measured:
    """Windows do not overlap; the first token of the text is predicted from the base's context
    token, the first of every other window from the token before it."""
    nats, counts = [], []
    with autocast(base.precision, base.device.type):
        for ids, mask in evaluation_windows(tokens, window, base.context_token, batch):
            losses = token_losses(model, ids.to(base.device)).cpu()
            nats.append((losses * mask).sum(1, dtype=torch.float64))
            counts.append(mask.sum(1))
    lengths = torch.cat(counts)
    return Measured(finite(torch.cat(nats), lengths), lengths)


def _answers(
    base: Base,
    model: PreTrainedModel,
    samples: Examples,
    window: int,
    batch: int,
    generate: int | None,
) -> tuple[Measured, dict[str, float]]:
    rows, others = with_choices(base, samples, window)
    nats, count = answer_losses(base, model, rows, batch), len(samples)
    given = [bool(item.choices) for item in samples.items]
    owners = torch.cat([torch.arange(count), others])
    texts = generate_answers(base, model, samples, generate, batch) if generate else ()
    measured = Measured(
        nats[:count],
        samples.lengths,
        [item.answer for item in samples.items],
        texts,
        Choices(nats, rows.lengths, owners, given) if any(given) else None,
    )
    return measured, {"samples": count}


def _pairs(
    base: Base, model: PreTrainedModel, pairs: Pairs, batch: int
) -> tuple[Measured, dict[str, float]]:
    assert pairs.reference is not None, "engines compute it before anything is scored"
    logprobs = pair_logprobs(base, model, pairs, batch)
    found = rewards(logprobs, pairs.reference)
    losses = preference_losses(found.values, pairs.reference.label_smoothing)
    counts = {
        "pairs": len(losses),
        "dpo_loss": losses.mean().item(),
        "reward_margin": found.margins.mean().item(),
    }
    return Measured(-logprobs[:, 0], pairs.chosen.lengths, rewards=found), counts


@torch.no_grad()
def mean_loss(base: Base, model: PreTrainedModel, batch: AnyBatch, at_once: int) -> float:
    """Nats per counted token of a model (the base, with whatever is attached), or DPO's loss of
    pairs; so many samples at once."""
    with autocast(base.precision, base.device.type):
        if isinstance(batch, PairBatch):
            parts = [(p.terms, dpo_loss(model, p.to(base.device))[0]) for p in batch.split(at_once)]
            return sum(terms * loss.item() for terms, loss in parts) / batch.terms
        losses = [token_losses(model, *part.to(base.device)).cpu() for part in batch.split(at_once)]
    return torch.cat(losses).sum(dtype=torch.float64).item() / batch.terms


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

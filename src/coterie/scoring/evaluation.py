"""Exact evaluation: every token of a split, or every answer, is predicted once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.batch import Batch
from coterie.data.examples import Examples
from coterie.data.tokens import Tokens
from coterie.data.windows import evaluation_windows
from coterie.scoring.answers import accuracy, answer_losses, exact, rouge_l, with_choices
from coterie.scoring.generation import generate_answers
from coterie.training.loss import logits_in_pieces, token_losses


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text."""

    nats: float
    """Negative log-likelihood of the whole text."""
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(nats per token); comparable between models with the same tokenizer only."""
        return math.exp(min(self.loss, 700))

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
        }


@dataclass(frozen=True)
class AnswerScore(Score):
    """How well a model answers prompts: the loss is of the answers, end tokens included."""

    samples: int
    accuracy: float | None = None
    """Share of samples whose answer is likelier, per token, than their other choices."""
    exact_match: float | None = None
    """Share of samples whose answer the model writes, taking the likeliest token each time."""
    rouge_l: float | None = None
    """How near what it writes comes to the answer: mean F1 of Rouge-L."""

    def as_dict(self) -> dict[str, float]:
        """For reports; what was not measured is left out."""
        found = {
            "accuracy": self.accuracy,
            "exact_match": self.exact_match,
            "rouge_l": self.rouge_l,
        }
        measured = {name: value for name, value in found.items() if value is not None}
        return {**super().as_dict(), "samples": self.samples, **measured}


def evaluate(
    base: Base,
    model: PreTrainedModel,
    tokens: Tokens | Examples,
    window: int,
    batch: int = 16,
    generate: int | None = None,
) -> Score:
    """Score a model (the base, with whatever is attached) on a text or on prompts with answers.

    The cross-entropy is in fp32; `batch` windows or samples are scored at once. `generate`: of
    prompts, write answers of at most so many tokens too; the score is an `AnswerScore`.
    """
    if isinstance(tokens, Examples):
        return _answers(base, model, tokens, window, batch, generate)
    return _text(base, model, tokens, window, batch)


@torch.no_grad()
def _text(base: Base, model: PreTrainedModel, tokens: Tokens, window: int, batch: int) -> Score:
    """Windows do not overlap; the first token of the text is predicted from the base's context
    token, the first of every other window from the token before it."""
    nats = torch.zeros((), dtype=torch.float64)
    with autocast(base.precision, base.device.type):
        for ids, mask in evaluation_windows(tokens, window, base.context_token, batch):
            losses = token_losses(model, ids.to(base.device)).cpu()
            nats += (losses * mask).sum(dtype=torch.float64)
    return Score(nats.item(), len(tokens.ids), tokens.bytes)


def _answers(
    base: Base,
    model: PreTrainedModel,
    samples: Examples,
    window: int,
    batch: int,
    generate: int | None,
) -> AnswerScore:
    rows, owners = with_choices(base, samples, window)
    nats = answer_losses(base, model, rows, batch)
    matched = rouge = None
    if generate is not None:
        answers = [item.answer for item in samples.items]
        texts = generate_answers(base, model, samples, generate, batch)
        matched, rouge = exact(answers, texts), rouge_l(answers, texts)
    return AnswerScore(
        nats[: len(samples)].sum().item(),
        samples.predicted,
        samples.bytes,
        len(samples),
        accuracy(nats, rows, owners),
        matched,
        rouge,
    )


@torch.no_grad()
def mean_loss(base: Base, model: PreTrainedModel, batch: Batch, at_once: int) -> float:
    """Nats per counted token of a model (the base, with whatever is attached); so many samples at
    once."""
    with autocast(base.precision, base.device.type):
        losses = [token_losses(model, *part.to(base.device)).cpu() for part in batch.split(at_once)]
    counted = batch.ids[:, 1:].numel() if batch.counted is None else int(batch.counted.sum())
    return torch.cat(losses).sum(dtype=torch.float64).item() / counted


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

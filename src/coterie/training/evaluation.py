"""Exact evaluation: every token of a split is predicted once."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.base import Base
from coterie.data import Tokens, evaluation_windows
from coterie.training.loss import token_losses
from coterie.training.precision import autocast


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


@torch.no_grad()
def evaluate(
    base: Base, model: PreTrainedModel, tokens: Tokens, window: int, batch: int = 16
) -> Score:
    """Score a model (the base, with whatever is attached) on a text, in windows of `window` tokens.

    Windows do not overlap; the first token of the text is predicted from the base's context token,
    the first of every other window from the token before it. The cross-entropy is in fp32.
    """
    nats = torch.zeros((), dtype=torch.float64)
    with autocast(base.precision, base.device.type):
        for ids, mask in evaluation_windows(tokens, window, base.context_token, batch):
            losses = token_losses(model, ids.to(base.device)).cpu()
            nats += (losses * mask).sum(dtype=torch.float64)
    return Score(nats.item(), len(tokens.ids), tokens.bytes)


@torch.no_grad()
def mean_loss(base: Base, ids: Tensor, batch: int) -> float:
    """Nats per token of the base, with whatever is attached, on windows (n, time + 1)."""
    with autocast(base.precision, base.device.type):
        losses = [token_losses(base.model, part.to(base.device)) for part in ids.split(batch)]
    return torch.cat(losses).mean(dtype=torch.float64).item()


@torch.no_grad()
def top_logits(base: Base, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of every token: values and places, (n * time, k), places ascending.

    ids: (n, time + 1), as for `token_losses`. One window's logits are held at a time.
    """
    found = []
    with autocast(base.precision, base.device.type):
        for window in ids[:, :-1]:
            logits = base.model(input_ids=window[None].to(base.device), use_cache=False).logits[0]
            places = logits.topk(k).indices.sort().values
            found.append((logits.gather(-1, places).float().cpu(), places.cpu()))
    values, places = zip(*found, strict=True)
    return torch.cat(values), torch.cat(places)

"""What a model expects at every position of the samples' answers: the likeliest tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.losses.tokens import logits_in_pieces


@dataclass(frozen=True)
class Predictions:
    """At p positions, those of one sample's answer and end token after another's."""

    tokens: Tensor
    """(p, k) int64, the likeliest first."""
    logprobs: Tensor
    """(p, k) float32."""
    lognorm: Tensor
    """(p,) float32: the log of the k probabilities' sum."""
    nats: Tensor
    """(p,) float32: negative log-likelihood of the sample's own next token."""


@torch.no_grad()
def predictions(
    base: Base, model: PreTrainedModel, samples: Examples, k: int, batch: int
) -> Predictions:
    """A model's k likeliest tokens, or as many as it has, at every position that a loss counts.

    Rows of the output head that are no token (some are wider than their vocabulary) are never
    among them.
    `batch` samples of similar lengths are read at once; logits are made a few tokens at a time.
    """
    lengths = samples.starts[1:] - samples.answers
    firsts = lengths.cumsum(0) - lengths
    order = samples.starts.diff().argsort(stable=True)
    found, places = [], []
    with autocast(base.precision, base.device.type):
        for chosen in order.split(batch):
            part = samples.batch(chosen)
            targets = part.ids[:, 1:][part.counted].to(base.device)
            for logits in logits_in_pieces(model, part.to(base.device)):
                target, targets = targets.split([len(logits), len(targets) - len(logits)])
                found.append([t.cpu() for t in _likeliest(logits, target, k, len(base.tokenizer))])
            spans = zip(firsts[chosen].tolist(), lengths[chosen].tolist(), strict=True)
            places += [torch.arange(start, start + length) for start, length in spans]
    # Back from the order of lengths to the samples' own.
    back = torch.cat(places).argsort()
    return Predictions(*(torch.cat(parts)[back] for parts in zip(*found, strict=True)))


def _likeliest(
    logits: Tensor, targets: Tensor, k: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in `Predictions`, of (n, vocabulary) logits and (n,) targets."""
    norm = logits.logsumexp(-1)
    values, tokens = logits[:, :vocabulary].topk(min(k, vocabulary, logits.shape[-1]))
    logprobs = values - norm[:, None]
    nats = norm - logits.gather(1, targets[:, None])[:, 0]
    return tokens, logprobs, logprobs.logsumexp(-1).clamp(max=0), nats

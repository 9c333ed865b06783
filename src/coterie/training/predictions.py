"""A model's predictions at each position of the samples' answers: the most likely tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.bases.devices import moved
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.losses.tokens import logits_in_pieces
from coterie.messages.host import copied_to_host


@dataclass(frozen=True)
class Predictions:
    """Predictions for the tokens of all answers, including the end tokens.

    The tokens are in the order of the samples. In the shapes below, p is the number of these tokens
    in all samples.
    """

    tokens: Tensor
    """(p, k) int64: the k most likely tokens at each position, the most likely first."""
    logprobs: Tensor
    """(p, k) float32: the log-probabilities of `tokens`."""
    lognorm: Tensor
    """(p,) float32: the log of the sum of the k probabilities."""
    nats: Tensor
    """(p,) float32: the negative log-likelihood of the sample's actual next token."""


@torch.no_grad()
def predictions(
    base: Base, model: PreTrainedModel, samples: Examples, k: int, batch: int
) -> Predictions:
    """Compute a model's k most likely tokens at every position that contributes to the loss.

    Some output heads have more rows than the vocabulary has tokens; the additional rows are never
    among the k tokens. Samples of similar lengths are put into the same batch, and logits are
    computed for a few tokens at a time.

    Args:
        base: The base.
        model: The base with an adapter.
        samples: The samples whose answers are predicted.
        k: The number of tokens per position. If the vocabulary has fewer tokens, all tokens are
            returned.
        batch: The number of samples in a forward pass.
    """
    lengths = samples.starts[1:] - samples.answers
    firsts = lengths.cumsum(0) - lengths
    order = samples.starts.diff().argsort(stable=True)
    results, positions = [], []
    with autocast(base.precision, base.device.type):
        for chosen in order.split(batch):
            part = samples.batch(chosen)
            targets = moved(part.ids[:, 1:][part.counted], base.device)
            for logits in logits_in_pieces(model, part.to(base.device)):
                target, targets = targets.split([len(logits), len(targets) - len(logits)])
                most_likely = _most_likely(logits, target, k, len(base.tokenizer))
                results.append(copied_to_host(most_likely))
            spans = zip(firsts[chosen].tolist(), lengths[chosen].tolist(), strict=True)
            positions += [torch.arange(start, start + length) for start, length in spans]
    # Restore the order of the samples, which were sorted by length.
    original = torch.cat(positions).argsort()
    return Predictions(*(torch.cat(parts)[original] for parts in zip(*results, strict=True)))


def _most_likely(
    logits: Tensor, targets: Tensor, k: int, vocabulary: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Predictions` for n positions.

    Args:
        logits: A tensor of shape (n, rows of the output head).
        targets: A tensor of shape (n,) with the samples' actual next tokens.
        k: The number of tokens per position.
        vocabulary: The number of tokens in the vocabulary.
    """
    norm = logits.logsumexp(-1)
    values, tokens = logits[:, :vocabulary].topk(min(k, vocabulary, logits.shape[-1]))
    logprobs = values - norm[:, None]
    nats = norm - logits.gather(1, targets[:, None])[:, 0]
    return tokens, logprobs, logprobs.logsumexp(-1).clamp(max=0), nats

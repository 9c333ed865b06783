"""Predictions in another vocabulary, one token after another."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from coterie.alignment.transfer import SoftTargets


def in_dictionary(
    tokens: Iterable[int],
    logprobs: Iterable[float],
    ids: Sequence[int] | Mapping[int, int],
    temperature: float,
) -> tuple[dict[int, float], float]:
    """Return the student's tokens with their probabilities, and the probability of what is kept.

    Of the teacher's tokens with one id, the first is kept; tokens with the id -1 are left out.
    """
    kept: dict[int, float] = {}
    for token, logprob in zip(tokens, logprobs, strict=True):
        if token >= 0 and ids[token] >= 0:
            kept.setdefault(ids[token], logprob)
    total = sum(math.exp(logprob / temperature) for logprob in kept.values())
    probs = {token: math.exp(value / temperature) / total for token, value in kept.items()}
    return probs, sum(map(math.exp, kept.values()))


def dense(probs: SoftTargets, size: int) -> Tensor:
    """Return the probabilities of a vocabulary, (p, size)."""
    return torch.zeros(len(probs.mass), size).scatter_add_(1, probs.tokens, probs.probs)

"""The choice of the next token from a model's scores."""

import torch
from torch import Tensor

from coterie.evaluation.generation import Sampling


def choose(logits: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """Choose a token.

    A token is drawn with a single uniform number. A request's tokens therefore depend only on its
    own generator and scores.

    Args:
        logits: The scores of all tokens, shaped (vocabulary,).
        sampling: The settings; with a temperature of 0, the token with the highest score is chosen.
        chance: The request's generator.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.double() / sampling.temperature).softmax(0)
    ids = torch.arange(len(logits))
    if sampling.top_p < 1:
        probabilities, ids = probabilities.sort(descending=True, stable=True)
        before = probabilities.cumsum(0) - probabilities
        count = max(1, int((before < sampling.top_p).sum()))  # the fewest tokens with this mass
        probabilities, ids = probabilities[:count], ids[:count]
    sums = probabilities.cumsum(0)
    point = torch.rand((), generator=chance, dtype=torch.float64) * sums[-1]
    return int(ids[min(int((sums <= point).sum()), len(ids) - 1)])

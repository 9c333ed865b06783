"""Perplexity: how unlikely a model finds a text, whatever the text is."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.data.measured import WORST, Measured
from coterie.evaluation.metrics import Metric, instance


class Perplexity(Metric):
    """exp(nats per token); comparable between models with the same tokenizer only."""

    name = title = "perplexity"
    higher = share = False
    logarithmic = True

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the perplexity of each item."""
        return [math.exp(min(mean, WORST)) for mean in (measured.nats / measured.tokens).tolist()]

    def sums(self, items: Mapping[str, Sequence[float | None]]) -> Sequence[Sequence[float]]:
        """Return nats and tokens."""
        return [[value or 0.0 for value in items[key]] for key in ("nats", "tokens")]

    def value(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the exponential of nats per token."""
        return np.exp(np.minimum(means, WORST))


PERPLEXITY = instance(Perplexity)

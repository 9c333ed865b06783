"""Perplexity: the exponential of the mean loss per token."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.data.measured import WORST, Measured
from coterie.evaluation.metrics import Metric, instance


class Perplexity(Metric):
    """The exponential of the mean loss per token.

    Perplexities are comparable only between models with the same tokenizer. The perplexity of a
    split is computed from the sums of losses and tokens over all items, so it is not the mean of
    the items' perplexities.
    """

    name = title = "perplexity"
    higher = share = False
    logarithmic = True

    def score(self, measured: Measured) -> Sequence[float | None]:
        return [math.exp(min(mean, WORST)) for mean in (measured.nats / measured.tokens).tolist()]

    def sums(self, items: Mapping[str, Sequence[float | None]]) -> Sequence[Sequence[float]]:
        return [[value or 0.0 for value in items[key]] for key in ("nats", "tokens")]

    def value(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp(np.minimum(means, WORST))


PERPLEXITY = instance(Perplexity)

"""What a model did with a text, from which metrics are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

WORST = 700.0
"""Nats per token of a text, or an answer, whose loss is not finite; its exponential still is."""
Needs = Literal["nothing", "answers", "choices", "pairs"]
"""What a metric is computed from: the losses of any items alone (nothing), answers that the model
generates, answers to choose from, or pairs of answers."""


@dataclass(frozen=True)
class Choices:
    """The losses of all answers that samples have to choose from; rows: samples, then others."""

    nats: "Tensor"
    """The loss of each row's answer: (rows,) float64."""
    tokens: "Tensor"
    """The tokens of each row's answer: (rows,) int64."""
    owners: "Tensor"
    """The sample that each row is an answer to: (rows,) int64; the first rows are 0, 1, ..."""
    given: Sequence[bool]
    """Whether a sample has answers to choose from, by sample."""


@dataclass(frozen=True)
class Measured:
    """What a model did with the n items of a text: windows, samples or pairs."""

    nats: "Tensor"
    """The negative log-likelihood of each item: (n,) float64."""
    tokens: "Tensor"
    """The tokens of each item: (n,) int64."""
    answers: Sequence[str] = ()
    """The right answers, where the items are samples."""
    texts: Sequence[str] = ()
    """The answers that the model generated, where a metric may need them."""
    choices: Choices | None = None
    preferred: Sequence[float] = ()
    """1 for each pair whose chosen answer has the higher reward, half where rewards are equal; of
    more answers than two, the mean over their pairs."""
    loss: float | None = None
    """The mean of the loss that is learnt, where it is none of single tokens."""

    def offers(self, needs: Needs) -> bool:
        """Return whether a metric that needs this can be computed."""
        offered = {
            "nothing": True,
            "answers": bool(self.texts),
            "choices": self.choices is not None,
            "pairs": bool(self.preferred),
        }
        return offered[needs]


def finite(nats: "Tensor", tokens: "Tensor") -> "Tensor":
    """Return losses in which those that are not finite, after divergence, are `WORST` per token.

    Results are JSON, which has neither NaN nor infinity.

    Args:
        nats: The loss of each text or answer, (n,).
        tokens: How many tokens each has, (n,).
    """
    return nats.where(nats.isfinite(), WORST * tokens)

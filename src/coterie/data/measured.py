"""A model's losses and answers on a split, from which metrics are computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

WORST = 700.0
"""The loss per token, in nats, that replaces a loss that is not finite.

The exponential of this value (the perplexity) is finite.
"""
Needs = Literal["nothing", "answers", "choices", "pairs"]
"""The input that a metric needs in addition to the losses of the items.

The value "nothing" stands for no further input, "answers" for the answers that the model generates,
"choices" for the losses of all answers to choose from, and "pairs" for preferences between the
answers of a pair.
"""


@dataclass(frozen=True)
class Choices:
    """A model's losses on all choices of n samples.

    Each row of the tensors describes one sample with one of its possible answers. The first n rows
    describe the n samples with their right answers. All other rows describe samples with wrong
    choices.
    """

    nats: "Tensor"
    """The loss of each row's answer in nats, as a float64 tensor shaped (rows,)."""
    tokens: "Tensor"
    """The number of tokens of each row's answer, as an int64 tensor shaped (rows,)."""
    owners: "Tensor"
    """The index of each row's sample, as an int64 tensor shaped (rows,).

    The first n values are 0 .. n-1.
    """
    given: Sequence[bool]
    """For each of the n samples, whether the sample has answers to choose from."""


@dataclass(frozen=True)
class Measured:
    """A model's losses and answers on the n items (windows, samples or pairs) of a split."""

    nats: "Tensor"
    """The negative log-likelihood of each item in nats, as a float64 tensor shaped (n,)."""
    tokens: "Tensor"
    """The number of predicted tokens of each item, as an int64 tensor shaped (n,)."""
    answers: Sequence[str] = ()
    """The right answer of each item if the items are samples; otherwise empty."""
    texts: Sequence[str] = ()
    """The answer that the model generated for each item; empty if it generated no answers."""
    choices: Choices | None = None
    """The losses of all choices; None if no sample has choices."""
    preferred: Sequence[float] = ()
    """For each pair, 1 if the chosen answer has the higher reward, 0.5 for a tie, and 0 otherwise.

    For an item with more than two answers, the value is the mean over all pairs of its answers.
    """
    loss: float | None = None
    """The mean training loss, or None if the training loss is the cross-entropy of tokens."""

    def offers(self, needs: Needs) -> bool:
        """Return whether the measurements include the input that a metric needs.

        Args:
            needs: The value of the metric's class variable `needs`.
        """
        offered = {
            "nothing": True,
            "answers": bool(self.texts),
            "choices": self.choices is not None,
            "pairs": bool(self.preferred),
        }
        return offered[needs]


def finite(nats: "Tensor", tokens: "Tensor") -> "Tensor":
    """Replace each infinite or NaN loss with `WORST` times the number of tokens.

    Losses are not finite if a model has diverged. They are replaced because results are stored as
    JSON, which has neither NaN nor infinity.

    Args:
        nats: The loss of each text or answer in nats, as a tensor shaped (n,).
        tokens: The number of tokens of each text or answer, as a tensor shaped (n,).
    """
    return nats.where(nats.isfinite(), WORST * tokens)

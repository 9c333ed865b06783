"""What a split of any kind of data offers to training and evaluation."""

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.examples import Examples, Scorer
from coterie.data.items import Conversation, Instruction
from coterie.data.measured import Measured
from coterie.losses.tokens import Batch


class Measures(Protocol):
    """What a loss measured beside its value, such as the rewards of pairs."""

    @staticmethod
    def figures(parts: Any) -> dict[str, float]:
        """Return means over what several pieces of a batch measured."""
        ...


class AnyBatch(Protocol):
    """Samples that a model learns from at once, and their loss."""

    @property
    def ids(self) -> Tensor:
        """A row of tokens for each sample: (samples, time + 1) int64."""
        ...

    @property
    def terms(self) -> int:
        """The number of terms that the loss is the mean of."""
        ...

    @property
    def read(self) -> Batch:
        """The samples whose tokens a model learns to write, without others beside them."""
        ...

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Measures | None]:
        """Return the loss, a scalar with a gradient, and what was measured beside it."""
        ...

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Return the loss, without a gradient, of samples read `at_once`."""
        ...

    def to(self, device: torch.device) -> Self:
        """Return the samples on a device."""
        ...

    def by_length(self) -> Self:
        """Return the samples, the shortest first."""
        ...

    def only(self, rows: Tensor) -> Self:
        """Return some of the samples, by their numbers."""
        ...

    def split(self, size: int) -> Iterator[Self]:
        """Yield the samples in batches of at most `size`."""
        ...


class Samples(Protocol):
    """What batches are drawn from."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, chosen: Tensor) -> AnyBatch:
        """Return the samples with these numbers."""
        ...


class Scored(Protocol):
    """What a model can be scored on."""

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of what is scored."""
        ...

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the items, and further figures for reports."""
        ...


class Split(Scored, Protocol):
    """A client's text as tokens: one stream, samples, pairs, or whatever a kind makes of it."""

    @property
    def ids(self) -> Tensor:
        """All tokens: (N,) int32."""
        ...

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """The samples that have a right answer; empty for other kinds."""
        ...

    @property
    def beginnings(self) -> Examples | None:
        """The samples that are read one by one; None for a stream."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether a reference's log-likelihoods must be computed before training."""
        ...

    def referenced(self, make: Callable[[Any], Any]) -> "Split":
        """Return the split with the reference that `make` computes, if it needs one."""
        ...

    def samples(self, window: int, step: int) -> Samples:
        """Return what batches are drawn from; a stream's windows start every `step` tokens."""
        ...

    def without(self, taken: Tensor, window: int) -> "Split":
        """Return the split without some of `samples(window, window + 1)`, by their numbers."""
        ...

    def few(self, most: int, window: int, context: int) -> Scored:
        """Return at most so many samples, evenly spaced, to compare models by."""
        ...

    def sample_tokens(self, window: int) -> float:
        """Return the tokens that a training sample reads, on average."""
        ...

    def counts(self) -> dict[str, int]:
        """Return what a run folder records of the split, beside its tokens."""
        ...

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the texts or items that are compared with other splits to find copies.

        Args:
            items: The documents or items that the split was encoded from.
        """
        ...

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield what identifies the split, tokens first."""
        ...

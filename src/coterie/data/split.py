"""Protocols of splits and batches, which training and evaluation use for every kind of data."""

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
    """Measurements that accompany the value of a loss, such as the rewards of pairs."""

    @staticmethod
    def figures(parts: Any) -> dict[str, float]:
        """Compute the means of the measurements over a batch that was processed in several parts.

        Each part was processed in one forward and backward pass.

        Args:
            parts: The measurements of each part of the batch.

        Returns:
            A mapping of names to means, for the training log.
        """
        ...


class AnyBatch(Protocol):
    """A batch of samples that can compute its loss."""

    @property
    def ids(self) -> Tensor:
        """The token ids of each sample, as an int64 tensor shaped (samples, time + 1)."""
        ...

    @property
    def terms(self) -> int:
        """The number of terms over which the loss is averaged, such as tokens or pairs."""
        ...

    @property
    def read(self) -> Batch:
        """The samples to pass to the model for computations other than the batch's loss.

        An example is the computation of logits. For pairs of answers, the value contains only the
        samples with the chosen answers. For all other built-in kinds of data, it contains all
        samples.
        """
        ...

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Measures | None]:
        """Compute the mean loss over the batch's terms.

        Args:
            model: The model to train.

        Returns:
            The loss, a scalar with a gradient; and further measurements, if any.
        """
        ...

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Compute the loss without a gradient.

        Args:
            model: The model.
            device: The model's device.
            at_once: The number of samples per forward pass.
        """
        ...

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        ...

    def by_length(self) -> Self:
        """Return the samples sorted by length, the shortest first."""
        ...

    def only(self, rows: Tensor) -> Self:
        """Return the samples with the indices `rows`, in that order."""
        ...

    def split(self, size: int) -> Iterator[Self]:
        """Yield the samples in batches of at most `size`."""
        ...


class Samples(Protocol):
    """A sequence of samples, from which batches are drawn."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, chosen: Tensor) -> AnyBatch:
        """Return the samples with the given indices.

        Args:
            chosen: The indices of the samples, as an int64 tensor shaped (samples,).
        """
        ...


class Scored(Protocol):
    """Encoded data on which a model can be evaluated."""

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes of the predicted text."""
        ...

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Measure a model's losses on all items, and any other values that metrics need.

        Args:
            scorer: The model, with the window and the batch size.

        Returns:
            The measurements; and a mapping of names to further values, which are shown in reports
            and stored under these names in result.json.
        """
        ...


class Split(Scored, Protocol):
    """A client's training, validation or test data as tokens, for any kind of data.

    A split is immutable: methods that select samples return a new split.
    """

    @property
    def ids(self) -> Tensor:
        """The concatenated tokens of the whole split, as an int32 tensor shaped (N,)."""
        ...

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """The samples as text, if the samples have right answers, or else an empty tuple."""
        ...

    @property
    def beginnings(self) -> Examples | None:
        """The samples, each of which is a separate text that the model reads from its beginning.

        For pairs of answers, the value contains only the samples with the chosen answers. For a
        stream, the value is None, because the model reads a stream as one text.
        """
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model's log-likelihoods must be computed before training."""
        ...

    def referenced(self, make: Callable[[Any], Any]) -> "Split":
        """Return the split with the log-likelihoods of a reference model.

        Args:
            make: A function that computes the reference model's log-likelihoods of the split.

        Returns:
            A split with the result of `make`, or the split itself if it needs no reference model.
        """
        ...

    def samples(self, window: int, step: int) -> Samples:
        """Return the samples from which training batches are drawn.

        Only streams use the arguments.

        Args:
            window: The number of tokens that are predicted in a window of a stream.
            step: The distance in tokens between the starts of a stream's windows.
        """
        ...

    def without(self, taken: Tensor, window: int) -> "Split":
        """Return the split without some of its samples.

        Args:
            taken: The indices of the samples to leave out. The indices refer to the samples that
                `samples(window, window + 1)` returns.
            window: The number of tokens that are predicted in a window of a stream.
        """
        ...

    def few(self, most: int, window: int, context: int) -> Scored:
        """Return a few samples, evenly spaced, on which models are compared.

        Args:
            most: The maximum number of samples.
            window: The number of tokens that are predicted in a window of a stream.
            context: The id of the token that is inserted before the first token of a stream.
        """
        ...

    def sample_tokens(self, window: int) -> float:
        """Return the mean number of tokens of a training sample.

        Args:
            window: The number of tokens that are predicted in a window of a stream.
        """
        ...

    def counts(self) -> dict[str, int]:
        """Return the counts that the run folder records in addition to the number of tokens.

        Returns:
            A mapping of names to counts, such as the number of samples, or the number of samples
            left out because they are too long.
        """
        ...

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return the content of the split as text, for the search for duplicates.

        Args:
            items: All items from which the split was encoded. Items of plain text are documents.

        Returns:
            The items that the split contains. Long items are cut into smaller items: documents into
            pieces, and conversations that exceed the window into samples.
        """
        ...

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield the contents that identify the split, for a digest; the tokens come first."""
        ...

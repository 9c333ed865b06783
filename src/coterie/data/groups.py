"""Groups of samples: several answers to each prompt, for losses that compare answers."""

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.chat import parts_of
from coterie.data.examples import Encoding, Examples, Sample, Scorer, samples_of
from coterie.data.item_split import ItemSplit
from coterie.data.items import Conversation, Instruction, Ranking
from coterie.data.measured import Measured
from coterie.data.parts import PartEncoder
from coterie.losses.tokens import Batch


@dataclass(frozen=True)
class GroupBatch:
    """A batch of n items for a loss that compares answers. An item is a prompt with its answers.

    A subclass defines `loss`.
    """

    rows: Batch
    """The samples of all items, in the order of the items. A sample is a prompt with one answer.

    The first sample of each item contains the item's best answer.
    """
    sizes: Tensor
    """The number of samples of each item, as an int64 tensor shaped (n,)."""

    @property
    def ids(self) -> Tensor:
        """The token ids of each item's prompt and best answer.

        The tensor is int64 and shaped (n, time + 1).
        """
        return self.read.ids

    @property
    def read(self) -> Batch:
        """The samples with the best answers, one per item.

        Computations of anything other than the batch's loss, such as logits, pass only these
        samples to the model.
        """
        return self.rows.only(firsts(self.sizes))

    @property
    def terms(self) -> int:
        """The number of items over which the loss is averaged."""
        return len(self.sizes)

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Any]:
        """Compute the mean loss of the items.

        Args:
            model: The model to train.

        Returns:
            The loss, a scalar with a gradient; and further measurements (`Measures`), or None if
            there are no further measurements.
        """
        raise NotImplementedError

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Compute the loss without a gradient, with `at_once` items per forward pass."""
        parts = [(p.terms, p.to(device).loss(model)[0]) for p in self.split(at_once)]
        return sum(terms * loss.item() for terms, loss in parts) / self.terms

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        return replace(self, rows=self.rows.to(device))

    def by_length(self) -> Self:
        """Return the items sorted by the length of their longest sample, the shortest first."""
        assert self.rows.real is not None
        lengths = by_item(self.rows.real.sum(1), self.sizes)
        return self.only(torch.stack([part.amax() for part in lengths]).argsort(stable=True))

    def only(self, rows: Tensor) -> Self:
        """Return the items with the indices `rows`, in that order."""
        chosen = self.rows.only(rows_of(self.sizes, rows))
        return replace(self, rows=chosen, sizes=self.sizes[rows])

    def split(self, size: int) -> Iterator[Self]:
        """Yield the items in batches of at most `size`."""
        for start in range(0, self.terms, size):
            yield self.only(torch.arange(start, min(start + size, self.terms)))


@dataclass(frozen=True)
class Groups(ItemSplit):
    """A split of n items with several answers each. A subclass defines `batch` and `measured`."""

    rows: Examples
    """The samples of all items, in the order of the items. A sample is a prompt with one answer.

    The first sample of each item contains the item's best answer. In a conversation, only the
    last answer counts towards the loss.
    """
    sizes: Tensor
    """The number of samples of each item, as an int64 tensor shaped (n,)."""
    items: tuple[Ranking, ...]
    """The items as text."""
    too_long: int = 0
    """The number of items left out because one of their samples did not fit the window."""

    @property
    def ids(self) -> Tensor:
        """All tokens, as an int32 tensor shaped (N,)."""
        return self.rows.ids

    @property
    def best(self) -> Examples:
        """For each item, the sample with the best answer."""
        return self.rows.only(firsts(self.sizes).tolist())

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes of the best answers of all items."""
        return self.best.bytes

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """An empty tuple, because an item with ranked answers has no single right answer."""
        return ()

    @property
    def beginnings(self) -> Examples:
        """The samples with the best answers, one per item.

        The model reads each of these samples as a separate text, from its beginning.
        """
        return self.best

    def sample_tokens(self, window: int) -> float:
        """Return the mean number of tokens per item, counting all of the item's samples."""
        return len(self.ids) / len(self)

    def counts(self) -> dict[str, int]:
        """Return the number of items, and the number of items left out because of their length."""
        return {"samples": len(self), "too_long": self.too_long}

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield the contents that identify the split, including the number of samples per item."""
        yield from self.rows.digested()
        yield self.sizes.numpy().tobytes()

    def only(self, chosen: Sequence[int]) -> Self:
        numbers = torch.as_tensor(chosen)
        return replace(
            self,
            rows=self.rows.only(rows_of(self.sizes, numbers).tolist()),
            sizes=self.sizes[numbers],
            items=tuple(self.items[n] for n in chosen),
        )

    def batch(self, chosen: Tensor) -> GroupBatch:
        """Return the items with the indices `chosen`, right-padded to the longest sample."""
        raise NotImplementedError

    def rows_in(self, chosen: Tensor) -> tuple[Batch, Tensor]:
        """Return the values for the fields `rows` and `sizes` of a `GroupBatch`.

        Args:
            chosen: The indices of the items that the batch contains.
        """
        return self.rows.batch(rows_of(self.sizes, chosen)), self.sizes[chosen]

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Evaluate the scorer's model on the items.

        Returns:
            The losses on the items; and a mapping of names to further values for reports.
        """
        raise NotImplementedError


def by_item(rows: Tensor, sizes: Tensor) -> Sequence[Tensor]:
    """Split the values of all samples into one tensor per item.

    Args:
        rows: The values of the samples of all items, in order, as a tensor shaped (samples, ...).
        sizes: The number of samples of each item, as a tensor shaped (n,).

    Returns:
        A list of n tensors. Each tensor contains the values of one item's samples, and is shaped
        (size, ...).
    """
    counts: list[int] = sizes.tolist()
    return rows.split(counts)


def firsts(sizes: Tensor) -> Tensor:
    """Return the index of each item's first sample, which has the best answer.

    Args:
        sizes: The number of samples of each item, as a tensor shaped (n,).

    Returns:
        The indices, as an int64 tensor shaped (n,).
    """
    return sizes.cumsum(0) - sizes


def rows_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the indices of all samples of some items.

    Args:
        sizes: The number of samples of each of the n items, as a tensor shaped (n,).
        chosen: The indices of the items whose samples are returned.

    Returns:
        The indices, as an int64 tensor shaped (rows,).
    """
    counts = sizes[chosen]
    inside = torch.arange(int(counts.sum())) - firsts(counts).repeat_interleave(counts)
    return firsts(sizes)[chosen].repeat_interleave(counts) + inside


def grouped(
    items: Sequence[Ranking], how: Encoding, noun: str
) -> tuple[Examples, Tensor, tuple[Ranking, ...], int]:
    """Encode items with several answers.

    An item is left out if one of its samples does not fit the window.

    Args:
        items: Prompts with their answers.
        how: The tokenizer and the settings of the encoding.
        noun: The word for an item in error messages, such as "pair".

    Returns:
        The fields `rows`, `sizes`, `items` and `too_long` of `Groups`.

    Raises:
        CoterieError: No item is left.
    """
    encoder = PartEncoder(how.encoder)
    kept: list[Ranking] = []
    samples: list[Sample] = []
    too_long = 0
    for item in items:
        item_samples = [_sample(answer, how, encoder) for answer in item.answers]
        if max(sample.tokens for sample in item_samples) > how.window + 1:
            too_long += 1
        elif how.limit is None or len(kept) < how.limit:
            kept.append(item)
            samples += item_samples
    if not kept:
        size = f"at most {how.window} tokens ({len(items)} are longer)"
        fitting = f"{noun} whose samples have {size}; raise data.window"
        raise how.nothing(items, fitting, f"{noun}s; add some")
    sizes = torch.tensor([len(item.answers) for item in kept])
    return samples_of(samples), sizes, tuple(kept), too_long


def _sample(item: Instruction | Conversation, how: Encoding, encoder: PartEncoder) -> Sample:
    """Encode a prompt with one of its answers; only the answer counts towards the loss."""
    texts = parts_of(item, how.template)
    ids = encoder.ids(texts)
    if isinstance(item, Instruction):
        first, end = how.ends
        ids = [[first, *ids[0]], [*ids[1], end]]
        size = len(item.answer.encode())
    else:
        assert how.template is not None, "a conversation needs a chat template"
        size = len(texts[-1].removesuffix(how.template.around[1]).strip().encode())
    *prompt, answer = ids
    return Sample([*((part, False) for part in prompt), (answer, True)], item, size)

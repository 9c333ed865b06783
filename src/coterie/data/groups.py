"""Several answers to each prompt, as samples, for losses that compare them."""

import builtins
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.data.chat import parts_of
from coterie.data.examples import Encoding, Examples, Sample, Scorer, even, left_of, samples_of
from coterie.data.items import Conversation, Instruction, Ranking
from coterie.data.measured import Measured
from coterie.data.parts import PartEncoder
from coterie.losses.tokens import Batch


@dataclass(frozen=True)
class GroupBatch:
    """What a loss is taken of that compares answers. A subclass defines `loss`."""

    rows: Batch
    """The samples of all items, those of an item one after another, its best answer first."""
    sizes: Tensor
    """How many samples each item has: (n,) int64."""

    @property
    def ids(self) -> Tensor:
        """A row for each item: the tokens of the sample with its best answer."""
        return self.read.ids

    @property
    def read(self) -> Batch:
        """The samples whose tokens a model learns to write: those with the best answers."""
        return self.rows.only(firsts(self.sizes))

    @property
    def terms(self) -> int:
        """The number of terms that the loss is the mean of: items."""
        return len(self.sizes)

    def loss(self, model: PreTrainedModel) -> tuple[Tensor, Any]:
        """Return the mean loss of the items, a scalar with a gradient, and what was measured."""
        raise NotImplementedError

    def mean_loss(self, model: PreTrainedModel, device: torch.device, at_once: int) -> float:
        """Return the loss, without a gradient, of items read `at_once`."""
        parts = [(p.terms, p.to(device).loss(model)[0]) for p in self.split(at_once)]
        return sum(terms * loss.item() for terms, loss in parts) / self.terms

    def to(self, device: torch.device) -> Self:
        """Return the items with their samples on a device."""
        return replace(self, rows=self.rows.to(device))

    def by_length(self) -> Self:
        """Return the items, the shortest first."""
        assert self.rows.real is not None
        lengths = by_item(self.rows.real.sum(1), self.sizes)
        return self.only(torch.stack([part.amax() for part in lengths]).argsort(stable=True))

    def only(self, rows: Tensor) -> Self:
        """Return some of the items, by their numbers."""
        chosen = self.rows.only(rows_of(self.sizes, rows))
        return replace(self, rows=chosen, sizes=self.sizes[rows])

    def split(self, size: int) -> Iterator[Self]:
        """Yield the items in batches of at most `size`."""
        for start in range(0, self.terms, size):
            yield self.only(torch.arange(start, min(start + size, self.terms)))


@dataclass(frozen=True)
class Groups:
    """A split of answers that are compared. A subclass defines `batch` and `measured`.

    rows: the samples of all items, those of an item one after another, its best answer first; only
    the last answer of a conversation counts. sizes: how many samples each item has, (n,) int64.
    too_long: how many items did not fit, of which one answer or several were too long.
    """

    rows: Examples
    sizes: Tensor
    items: tuple[Ranking, ...]
    too_long: int = 0

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    @property
    def ids(self) -> Tensor:
        """All tokens: (N,) int32."""
        return self.rows.ids

    @property
    def best(self) -> Examples:
        """The samples with the best answers."""
        return self.rows.only(firsts(self.sizes).tolist())

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the best answers."""
        return self.best.bytes

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """No item is a question with a right answer."""
        return ()

    @property
    def beginnings(self) -> Examples:
        """The samples that are read as texts: those with the best answers."""
        return self.best

    @property
    def needs_reference(self) -> bool:
        """Whether a reference's log-likelihoods are still to be computed."""
        return False

    def referenced(self, make: Callable[[Any], Any]) -> Self:
        """Return the items with their reference, if they need one."""
        return self

    def samples(self, window: int, step: int) -> Self:
        """Return what a batch is drawn from: whole items, whatever the window."""
        return self

    def without(self, taken: Tensor, window: int) -> Self:
        """Return the items but those with the numbers `taken`, in their order."""
        return self.only(left_of(taken, len(self)))

    def few(self, most: int, window: int, context: int) -> Self:
        """Return at most so many items, evenly spaced."""
        return self.only(even(len(self), most).tolist())

    def sample_tokens(self, window: int) -> float:
        """Return the tokens that an item has, on average."""
        return len(self.ids) / len(self)

    def counts(self) -> dict[str, int]:
        """Return what a run folder records of the split, beside its tokens."""
        return {"samples": len(self), "too_long": self.too_long}

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return what is compared with other splits: the items."""
        return self.items

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield what identifies the split: tokens, and what makes items of them."""
        yield from self.rows.digested()
        yield self.sizes.numpy().tobytes()

    def only(self, chosen: Sequence[int]) -> Self:
        """Return these items, in this order."""
        numbers = torch.as_tensor(chosen)
        return replace(
            self,
            rows=self.rows.only(rows_of(self.sizes, numbers).tolist()),
            sizes=self.sizes[numbers],
            items=tuple(self.items[n] for n in chosen),
        )

    def batch(self, chosen: Tensor) -> GroupBatch:
        """Return the items with these numbers, padded at their ends to the longest sample."""
        raise NotImplementedError

    def rows_in(self, chosen: Tensor) -> tuple[Batch, Tensor]:
        """Return the first two fields of a batch of the items with these numbers."""
        return self.rows.batch(rows_of(self.sizes, chosen)), self.sizes[chosen]

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the items, and further figures for reports."""
        raise NotImplementedError


def by_item(rows: Tensor, sizes: Tensor) -> Sequence[Tensor]:
    """Return the values of each item's samples, given those of all samples: n times (size,)."""
    counts: list[int] = sizes.tolist()
    return rows.split(counts)


def firsts(sizes: Tensor) -> Tensor:
    """Return the row of each item's best answer: (n,)."""
    return sizes.cumsum(0) - sizes


def rows_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the rows of some items' samples among those of all items of these sizes: (rows,)."""
    counts = sizes[chosen]
    inside = torch.arange(int(counts.sum())) - firsts(counts).repeat_interleave(counts)
    return firsts(sizes)[chosen].repeat_interleave(counts) + inside


def grouped(
    items: Sequence[Ranking], how: Encoding, noun: str
) -> tuple[Examples, Tensor, tuple[Ranking, ...], int]:
    """Return the fields of `Groups`; items with a sample that does not fit are left out.

    Args:
        items: Prompts with their answers.
        how: How they become tokens.
        noun: What an item is, for errors, such as "pair".

    Raises:
        CoterieError: No item is left.
    """
    encoder = PartEncoder(how.encoder)
    kept: list[Ranking] = []
    samples: list[Sample] = []
    too_long = 0
    for item in items:
        found = [_sample(answer, how, encoder) for answer in item.answers]
        if max(sample.tokens for sample in found) > how.window + 1:
            too_long += 1
        elif how.limit is None or len(kept) < how.limit:
            kept.append(item)
            samples += found
    if not kept:
        size = f"at most {how.window} tokens ({len(items)} are longer)"
        fitting = f"{noun} whose samples have {size}; raise data.window"
        raise how.nothing(items, fitting, f"{noun}s; add some")
    sizes = torch.tensor([len(item.answers) for item in kept])
    return samples_of(samples), sizes, tuple(kept), too_long


def _sample(item: Instruction | Conversation, how: Encoding, encoder: PartEncoder) -> Sample:
    """Return a prompt with one of its answers as tokens, of which those of the answer count."""
    texts = parts_of(item, how.template)
    ids = encoder.ids(texts)
    if isinstance(item, Instruction):
        first, end = how.ends
        ids = [[first, *ids[0]], [*ids[1], end]]
        size = len(item.answer.encode())
    else:
        assert how.template is not None, "there are conversations"
        size = len(texts[-1].removesuffix(how.template.around[1]).strip().encode())
    *before, last = ids
    return Sample([*((part, False) for part in before), (last, True)], item, size)

"""Preferences as tokens: pairs of samples that differ in their answers, and batches of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.data.batch import Batch
from coterie.data.chat import ChatTemplate, Conversation
from coterie.data.examples import Examples, Instruction, samples_of, split
from coterie.data.parts import PartEncoder
from coterie.data.preferences import Preference
from coterie.errors import CoterieError

Parts = list[tuple[list[int], bool]]
"""A sample's parts: their tokens, and whether the loss counts them."""


class Reference(NamedTuple):
    """What answers are compared with."""

    logprobs: Tensor
    """The reference's log-likelihood of each pair's chosen and rejected answer, ends included:
    (n, 2) float64, in nats."""
    beta: float
    """Reward per nat that an answer is likelier than under the reference."""
    label_smoothing: float
    """The probability that a pair is the wrong way round."""
    rounding: Tensor
    """The largest difference between a pair's two rewards that may be due to rounding:
    (n,) float64."""

    def only(self, rows: Tensor | slice) -> Self:
        """Return the reference of some pairs."""
        return self._replace(logprobs=self.logprobs[rows], rounding=self.rounding[rows])


class PairBatch(NamedTuple):
    """What a preference loss is taken of."""

    both: Batch
    """2 n samples: the chosen answer of pair i in row 2 i, the rejected one in row 2 i + 1."""
    reference: Reference

    @property
    def ids(self) -> Tensor:
        """A row for each pair: its chosen sample's tokens."""
        return self.both.ids[::2]

    @property
    def chosen(self) -> Batch:
        """The samples with the chosen answers."""
        return self.both.only(torch.arange(0, len(self.both.ids), 2))

    @property
    def terms(self) -> int:
        """Of how many terms the loss is the mean: pairs."""
        return len(self.reference.logprobs)

    def to(self, device: torch.device) -> Self:
        """The same with its samples on a device."""
        return self._replace(both=self.both.to(device))

    def by_length(self) -> Self:
        """The same pairs, the shortest first."""
        assert self.both.real is not None
        longest = self.both.real.sum(1).view(-1, 2).amax(1)
        return self.only(longest.argsort(stable=True))

    def only(self, rows: Tensor) -> Self:
        """Some of the pairs, by their numbers."""
        return type(self)(self.both.only(both_rows(rows)), self.reference.only(rows))

    def split(self, size: int) -> Iterator[Self]:
        """The same in batches of at most `size` pairs."""
        for number, part in enumerate(self.both.split(2 * size)):
            rows = slice(number * size, (number + 1) * size)
            yield type(self)(part, self.reference.only(rows))


AnyBatch = Batch | PairBatch


def both_rows(pairs: Tensor) -> Tensor:
    """The rows of some pairs' samples among all: (2 n,)."""
    return torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()


@dataclass(frozen=True)
class Pairs:
    """Preferences as samples.

    both: 2 n samples, the chosen answer of pair i at 2 i and the rejected one at 2 i + 1; only
    the last answer of a conversation counts. too_long: how many pairs did not fit, of which one
    answer or both were too long. reference: once it is known.
    """

    both: Examples
    items: tuple[Preference, ...]
    too_long: int = 0
    reference: Reference | None = None

    def __len__(self) -> int:
        """How many pairs."""
        return len(self.items)

    @property
    def ids(self) -> Tensor:
        """All tokens: (N,) int32."""
        return self.both.ids

    @property
    def chosen(self) -> Examples:
        """The samples with the chosen answers."""
        return self.both.only(range(0, len(self.both), 2))

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all answers."""
        return self.both.bytes

    def only(self, chosen: Sequence[int]) -> "Pairs":
        """These pairs, in this order."""
        rows = torch.as_tensor(chosen)
        return replace(
            self,
            both=self.both.only(both_rows(rows).tolist()),
            items=tuple(self.items[n] for n in chosen),
            reference=None if self.reference is None else self.reference.only(rows),
        )

    def sample(self, batch: int, chance: torch.Generator) -> PairBatch:
        """Pairs at random, drawn with replacement."""
        return self.batch(torch.randint(len(self), (batch,), generator=chance))

    def batch(self, chosen: Tensor | range) -> PairBatch:
        """These pairs, padded at their ends to the longest of them."""
        rows = torch.as_tensor(chosen)
        assert self.reference is not None, "engines compute it before anything is learnt"
        return PairBatch(self.both.batch(both_rows(rows)), self.reference.only(rows))


def joined_pairs(parts: Sequence[Pairs], both: Examples) -> Pairs:
    """Several clients' pairs as one client's; `both`: their samples, joined."""
    items = tuple(item for part in parts for item in part.items)
    return Pairs(both, items, sum(part.too_long for part in parts))


def pairs(
    items: Sequence[Preference],
    encoder: Tokenizer,
    ends: tuple[int, int],
    template: ChatTemplate | None,
    window: int,
    limit: int | None,
    owner: str,
) -> Pairs:
    """Preferences as tokens; pairs with a sample of more than window + 1 are dropped and counted.

    ends: the tokens before a text prompt and after its answer. template: of conversations. `limit`
    keeps so many pairs at most, from the start. `owner` begins an error: "Client anna: its train
    text". Raises CoterieError if none is left.
    """
    ids_of = PartEncoder(encoder).ids

    def read(item: Instruction | Conversation) -> tuple[Parts, int]:
        """A sample's parts, and UTF-8 bytes of its answer."""
        if isinstance(item, Instruction):
            texts, (before, after), size = split(item), ends, len(item.answer.encode())
        else:
            assert template is not None, "there are conversations"
            texts = tuple(text for text, _ in template.rendered(item).parts)
            size = len(texts[-1].removesuffix(template.around[1]).strip().encode())
            before = after = None
        ids = ids_of(texts)
        ids[0] = ids[0] if before is None else [before, *ids[0]]
        ids[-1] = ids[-1] if after is None else [*ids[-1], after]
        return [(part, n == len(ids) - 1) for n, part in enumerate(ids)], size

    kept: list[Preference] = []
    found: list[tuple[Parts, int]] = []
    too_long = 0
    for item in items:
        both = [read(item.chosen), read(item.rejected)]
        if any(sum(len(ids) for ids, _ in parts) > window + 1 for parts, _ in both):
            too_long += 1
        elif limit is None or len(kept) < limit:
            kept.append(item)
            found += both
    if not kept:
        raise CoterieError(
            f"{owner} has no pair whose two samples have at most {window} tokens ({len(items)} "
            "are longer); raise data.window."
            if items
            else f"{owner} has no pairs; add some or raise its data.fractions."
        )
    rows, sizes = zip(*found, strict=True)
    samples = [sample for item in kept for sample in (item.chosen, item.rejected)]
    return Pairs(samples_of(rows, samples, sizes, 0), tuple(kept), too_long)

"""Prompts with their answers, and conversations, as tokens; the loss counts the answers alone."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.data.batch import Batch
from coterie.data.chat import ChatTemplate
from coterie.data.items import Conversation, Instruction
from coterie.errors import CoterieError

S = TypeVar("S")


@dataclass(frozen=True)
class Examples:
    """Samples, one after another: a first token, the prompt, the answer, the end token; or a
    conversation as its template renders it, to the end of its last answer.

    ids: (N,) int32. counted: (N,) bool, the tokens of all answers with what ends them. tokens: (n,)
    int64, how many each sample has. last: (n,) int64, how many of them are its last answer. sizes:
    (n,) int64, UTF-8 bytes of each one's answers. too_long: how many did not fit. cut: how many
    conversations were cut into several samples. template: of conversations.
    """

    ids: Tensor
    counted: Tensor
    tokens: Tensor
    last: Tensor
    sizes: Tensor
    items: tuple[Instruction | Conversation, ...]
    too_long: int = 0
    cut: int = 0
    template: ChatTemplate | None = None

    def __len__(self) -> int:
        """How many samples."""
        return len(self.items)

    @cached_property
    def starts(self) -> Tensor:
        """Where each sample begins, and N: (n + 1,) int64."""
        return torch.nn.functional.pad(self.tokens.cumsum(0), (1, 0))

    @cached_property
    def answers(self) -> Tensor:
        """Where each one's last answer begins: (n,) int64."""
        return self.starts[1:] - self.last

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The items of samples that are prompts with answers."""
        found = tuple(item for item in self.items if isinstance(item, Instruction))
        assert len(found) == len(self), "asked for where there are no conversations"
        return found

    @property
    def markers(self) -> tuple[str, ...]:
        """All that ends answers in conversations, as some templates have another inside one."""
        return () if self.template is None else self.template.markers

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of all answers."""
        return int(self.sizes.sum())

    @property
    def lengths(self) -> Tensor:
        """Tokens of each one's answers, ends included: what a loss or a score is over; (n,)
        int64."""
        return torch.nn.functional.pad(self.counted.cumsum(0), (1, 0))[self.starts].diff()

    def only(self, chosen: Sequence[int]) -> "Examples":
        """These samples, in this order."""
        rows, tokens = torch.as_tensor(chosen), self.tokens.tolist()
        ids, counted = self.ids.split(tokens), self.counted.split(tokens)
        return replace(
            self,
            ids=torch.cat([ids[n] for n in chosen]),
            counted=torch.cat([counted[n] for n in chosen]),
            tokens=self.tokens[rows],
            last=self.last[rows],
            sizes=self.sizes[rows],
            items=tuple(self.items[n] for n in chosen),
        )

    def batch(self, chosen: Tensor | range) -> Batch:
        """These samples, padded at their ends to the longest of them."""
        chosen = torch.as_tensor(chosen)
        starts, ends = self.starts[chosen], self.starts[chosen + 1]
        place = torch.arange(int((ends - starts).max()))
        inside = place < (ends - starts)[:, None]
        places = (starts[:, None] + place).clamp(max=len(self.ids) - 1)
        counted = inside & self.counted[places]
        return Batch(self.ids[places].long() * inside, counted[:, 1:], inside[:, 1:])


def joined(parts: Sequence[S]) -> S:
    """Several streams, several clients' samples or several clients' pairs as one.

    Tensors and items follow one another, and counts are added up; all else is as in the first.
    """
    first: Any = parts[0]
    whole: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        match values[0]:
            case Tensor():
                whole[field.name] = torch.cat(values)
            case int():
                whole[field.name] = sum(values)
            case tuple():
                whole[field.name] = tuple(chain(*values))
            case value if is_dataclass(value):
                whole[field.name] = joined(values)
    return replace(first, **whole)


@dataclass(frozen=True)
class Encoding:
    """How the items of a split become tokens.

    ends: the tokens before a text prompt and after its answer. window: samples of more than
    window + 1 tokens do not fit. limit: at most so many samples, or tokens of a stream, are
    kept, from the start. owner: begins an error, such as "Client anna: its train text".
    template: of conversations.
    """

    encoder: Tokenizer
    ends: tuple[int, int]
    window: int
    limit: int | None
    owner: str
    template: ChatTemplate | None = None

    def nothing(self, items: Sequence[Any], fitting: str, kind: str) -> CoterieError:
        """The error that no sample is left: of the items none is `fitting`, or there are none of
        this kind; both say what to do."""
        what = f"{fitting}." if items else f"{kind} or raise its data.fractions."
        return CoterieError(f"{self.owner} has no {what}")


class Sample(NamedTuple):
    """A sample as tokens."""

    parts: Sequence[tuple[list[int], bool]]
    """The ids of each part, and whether they count; the last part is the last answer."""
    item: Instruction | Conversation
    bytes: int = 0
    """UTF-8 bytes of its answers."""

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return sum(len(ids) for ids, _ in self.parts)


def samples_of(
    samples: Sequence[Sample],
    too_long: int = 0,
    cut: int = 0,
    template: ChatTemplate | None = None,
) -> Examples:
    """Samples, one after another."""
    parts = [part for sample in samples for part in sample.parts]
    return Examples(
        torch.tensor([id for ids, _ in parts for id in ids], dtype=torch.int32),
        torch.tensor([said for ids, said in parts for _ in ids]),
        torch.tensor([sample.tokens for sample in samples]),
        torch.tensor([len(sample.parts[-1][0]) for sample in samples]),
        torch.tensor([sample.bytes for sample in samples]),
        tuple(sample.item for sample in samples),
        too_long,
        cut,
        template,
    )

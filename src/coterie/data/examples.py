"""Prompts with their answers, and conversations, as tokens; the loss counts the answers alone."""

import builtins
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.bases import Base
from coterie.data.chat import ChatTemplate, parts_of
from coterie.data.items import Conversation, Instruction
from coterie.data.measured import Choices, Measured
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch

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

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """The samples, which all have a right answer."""
        return self.items

    @property
    def beginnings(self) -> "Examples":
        """The samples, which are read one by one."""
        return self

    @property
    def needs_reference(self) -> bool:
        """Samples are compared with nothing."""
        return False

    def referenced(self, make: Callable[[Any], Any]) -> "Examples":
        """Return the samples, which need no reference."""
        return self

    def samples(self, window: int, step: int) -> "Examples":
        """Return what batches are drawn from: whole samples, whatever the window."""
        return self

    def without(self, taken: Tensor, window: int) -> "Examples":
        """Return the samples but those with the numbers `taken`, in their order."""
        return self.only(left_of(taken, len(self)))

    def few(self, most: int, window: int, context: int) -> "Examples":
        """Return at most so many samples, evenly spaced."""
        return self.only(even(len(self), most).tolist())

    def sample_tokens(self, window: int) -> float:
        """Return the tokens that a sample has, on average."""
        return len(self.ids) / len(self)

    def counts(self) -> dict[str, int]:
        """Return what a run folder records of the split, beside its tokens."""
        cut = {"cut": self.cut} if self.template else {}
        return {"samples": len(self), "too_long": self.too_long, **cut}

    def compared(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return what is compared with other splits: the samples."""
        return self.items

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield what identifies the split: tokens, and what makes samples of them."""
        yield self.ids.numpy().tobytes()
        yield self.starts.numpy().tobytes()
        yield self.answers.numpy().tobytes()
        if self.template is not None:  # elsewhere, what counts follows from the others
            yield self.counted.numpy().tobytes()
        yield repr([item.choices for item in self.items]).encode()

    def prompts(self, base: Base) -> list[Tensor]:
        """Return what comes before each sample's last answer.

        It is what the sample has there, except where a token of the sample holds the end of the
        prompt and the start of the answer.
        """
        encoder, first = PartEncoder(bare_encoder(base.tokenizer)[0]), base.context_token
        prompts: list[Tensor] = []
        for item in self.items:
            ids = encoder.opening(parts_of(item, self.template))
            ids = [first, *ids] if self.template is None else ids or [first]
            prompts.append(torch.tensor(ids))
        return prompts

    def measured(self, scorer: "Scorer") -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the samples, and how many they are."""
        rows, others = with_choices(scorer.base, self, scorer.window)
        nats, count = scorer.losses(rows, scorer.batch), len(self)
        given = [bool(item.choices) for item in self.items]
        owners = torch.cat([torch.arange(count), others])
        choices = Choices(nats, rows.lengths, owners, given) if any(given) else None
        answers = [item.answer for item in self.items]
        texts = scorer.texts(self)
        return Measured(nats[:count], self.lengths, answers, texts, choices), {"samples": count}

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
    template: of conversations. split: train, validation, test or public.
    """

    encoder: Tokenizer
    ends: tuple[int, int]
    window: int
    limit: int | None
    owner: str
    template: ChatTemplate | None = None
    split: str = "train"

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


def with_choices(base: Base, samples: Examples, window: int) -> tuple[Examples, Tensor]:
    """The samples, and after them each again with every other of its choices as the answer.

    Second, the samples that the added rows are of: (added,) int64. A row is cut after window + 1
    tokens, which leaves something of any choice.
    """
    owners: list[int] = []
    texts: list[Sequence[str]] = []
    for number, item in enumerate(samples.items):
        others = [choice for choice in dict.fromkeys(item.choices) if choice != item.answer]
        owners += [number] * len(others)
        if isinstance(item, Instruction):
            texts += [replace(item, answer=choice).parts for choice in others]
        elif others:
            assert samples.template is not None, "as all conversations"
            *before, _ = parts_of(item, samples.template)
            lead, end = samples.template.around
            texts += [[*before, f"{lead}{choice}{end}"] for choice in others]
    if not texts:
        return samples, torch.zeros(0, dtype=torch.int64)
    encoder, eos = bare_encoder(base.tokenizer)
    rows: list[Sample] = []
    items = [samples.items[owner] for owner in owners]
    for item, parts in zip(items, PartEncoder(encoder).batch(texts), strict=True):
        *prompt, answer = (part.ids for part in parts)
        before = [id for ids in prompt for id in ids]
        if samples.template is None:
            before, answer = [base.context_token, *before], [*answer, eos]
        before = before or [base.context_token]
        answer = answer[: window + 1 - len(before)]
        rows.append(Sample([(before, False), (answer, True)], item))
    return joined([samples, samples_of(rows)]), torch.tensor(owners)


class Scorer(Protocol):
    """A model that is scored on a held-out text."""

    @property
    def base(self) -> Base:
        """The model's base."""
        ...

    @property
    def window(self) -> int:
        """Tokens that a window or a sample predicts at most."""
        ...

    @property
    def batch(self) -> int:
        """Windows, samples or pairs that are read at once."""
        ...

    def losses(self, rows: Examples, batch: int) -> Tensor:
        """Return the loss of each row's answers: (rows,) float64, in nats."""
        ...

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each token: (batch, time) float32, in nats."""
        ...

    def texts(self, rows: Examples) -> Sequence[str]:
        """Return the answer that the model generates to each row, if any are asked for."""
        ...


def even(count: int, most: int) -> Tensor:
    """At most so many of the numbers 0 .. count-1, evenly spaced."""
    taken = min(count, most)
    return torch.arange(taken) * count // taken


def left_of(taken: Tensor, count: int) -> list[int]:
    """Return the numbers 0 .. count-1 that are not taken."""
    left = torch.ones(count, dtype=torch.bool)
    left[taken] = False
    return left.nonzero().flatten().tolist()

"""Prompts with answers, and conversations, as tokens; only answers count towards the loss."""

import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.bases import Base
from coterie.data.chat import ChatTemplate, parts_of
from coterie.data.item_split import ItemSplit
from coterie.data.items import Conversation, Instruction
from coterie.data.measured import Choices, Measured
from coterie.data.parts import PartEncoder, bare_encoder
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch

S = TypeVar("S")


@dataclass(frozen=True)
class Examples(ItemSplit):
    """A split of n samples with N tokens in total.

    The encoding of a prompt with an answer begins with the base's context token, which is the
    beginning-of-text token or, if there is none, the end-of-text token. The prompt, the answer and
    the end-of-text token follow. A conversation is encoded as the chat template renders it, up to
    the end of the last answer.
    """

    ids: Tensor
    """The concatenated tokens of all samples, as an int32 tensor shaped (N,)."""
    counted: Tensor
    """A mask of the tokens that count towards the loss, as a bool tensor shaped (N,).

    The tokens of answers count, and so do the tokens that end answers.
    """
    tokens: Tensor
    """The number of tokens of each sample, as an int64 tensor shaped (n,)."""
    last: Tensor
    """The number of tokens of each sample's last answer, as an int64 tensor shaped (n,)."""
    sizes: Tensor
    """The number of UTF-8 bytes of each sample's answers, as an int64 tensor shaped (n,)."""
    items: tuple[Instruction | Conversation, ...]
    """The samples as text."""
    too_long: int = 0
    """The number of samples, or of exchanges in conversations, that were too long and left out."""
    cut: int = 0
    """The number of conversations that were cut into several samples."""
    template: ChatTemplate | None = None
    """The chat template of conversations; None for instructions."""

    @cached_property
    def starts(self) -> Tensor:
        """The index of each sample's first token, followed by N, the total number of tokens.

        The tensor is int64 and shaped (n + 1,).
        """
        return torch.nn.functional.pad(self.tokens.cumsum(0), (1, 0))

    @cached_property
    def answers(self) -> Tensor:
        """The start of each sample's last answer in `ids`, as an int64 tensor shaped (n,)."""
        return self.starts[1:] - self.last

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The samples as text. Every sample must be an instruction."""
        instructions = tuple(item for item in self.items if isinstance(item, Instruction))
        assert len(instructions) == len(self), "the split contains conversations"
        return instructions

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that end answers in conversations; empty for instructions."""
        return () if self.template is None else self.template.markers

    @property
    def bytes(self) -> int:
        """The number of UTF-8 bytes of all answers."""
        return int(self.sizes.sum())

    @property
    def lengths(self) -> Tensor:
        """The number of tokens per sample that count towards the loss.

        The tensor is int64 and shaped (n,).
        """
        return torch.nn.functional.pad(self.counted.cumsum(0), (1, 0))[self.starts].diff()

    @property
    def questions(self) -> tuple[Instruction | Conversation, ...]:
        """The samples that have a right answer, as text: in this split, all samples."""
        return self.items

    @property
    def beginnings(self) -> "Examples":
        """The samples that the model reads without preceding text: in this split, all samples."""
        return self

    def sample_tokens(self, window: int) -> float:
        """Return the mean number of tokens of a sample."""
        return len(self.ids) / len(self)

    def counts(self) -> dict[str, int]:
        """Return the numbers of samples, of samples left out, and of conversations cut.

        A sample is left out if it is too long. A long conversation is cut into several samples.
        """
        cut = {"cut": self.cut} if self.template else {}
        return {"samples": len(self), "too_long": self.too_long, **cut}

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield the tokens, sample boundaries and answer choices, which identify the split."""
        yield self.ids.numpy().tobytes()
        yield self.starts.numpy().tobytes()
        yield self.answers.numpy().tobytes()
        if self.template is not None:  # for instructions, `counted` follows from the boundaries
            yield self.counted.numpy().tobytes()
        yield repr([item.choices for item in self.items]).encode()

    def prompts(self, base: Base) -> list[Tensor]:
        """Return the token ids of each sample's prompt, which is all text before the last answer.

        The token ids are the same as in the sample, unless one token spans the boundary between the
        prompt and the answer. In that case, the prompt is encoded on its own.
        """
        encoder, first = PartEncoder(bare_encoder(base.tokenizer)[0]), base.context_token
        prompts: list[Tensor] = []
        for item in self.items:
            ids = encoder.opening(parts_of(item, self.template))
            ids = [first, *ids] if self.template is None else ids or [first]
            prompts.append(torch.tensor(ids))
        return prompts

    def measured(self, scorer: "Scorer") -> tuple[Measured, dict[str, float]]:
        """Return losses and generated answers of the scorer's model, and the number of samples."""
        rows, other_owners = with_choices(scorer.base, self, scorer.window)
        nats, count = scorer.losses(rows, scorer.batch), len(self)
        has_choices = [bool(item.choices) for item in self.items]
        owners = torch.cat([torch.arange(count), other_owners])
        choices = Choices(nats, rows.lengths, owners, has_choices) if any(has_choices) else None
        answers = [item.answer for item in self.items]
        texts = scorer.texts(self)
        return Measured(nats[:count], self.lengths, answers, texts, choices), {"samples": count}

    def only(self, chosen: Sequence[int]) -> Self:
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
        """Return the samples with the indices `chosen`, right-padded to the longest of them."""
        chosen = torch.as_tensor(chosen)
        starts, ends = self.starts[chosen], self.starts[chosen + 1]
        place = torch.arange(int((ends - starts).max()))
        inside = place < (ends - starts)[:, None]
        places = (starts[:, None] + place).clamp(max=len(self.ids) - 1)
        counted = inside & self.counted[places]
        return Batch(self.ids[places].long() * inside, counted[:, 1:], inside[:, 1:])


def joined(parts: Sequence[S]) -> S:
    """Concatenate splits of the same class, such as `Examples`, into one split.

    Tensors and tuples in the splits' fields are concatenated, integers are added, and nested
    dataclasses are joined field by field. All other fields are copied from the first split.
    """
    first: Any = parts[0]
    joined_fields: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(part, field.name) for part in parts]
        match values[0]:
            case Tensor():
                joined_fields[field.name] = torch.cat(values)
            case int():
                joined_fields[field.name] = sum(values)
            case tuple():
                joined_fields[field.name] = tuple(chain(*values))
            case value if is_dataclass(value):
                joined_fields[field.name] = joined(values)
    return replace(first, **joined_fields)


@dataclass(frozen=True)
class Encoding:
    """The tokenizer and the settings with which the items of a split are encoded."""

    encoder: Tokenizer
    """The base's encoder, which adds no special tokens (`bare_encoder`)."""
    ends: tuple[int, int]
    """The ids of two tokens: the token before a prompt, and the token after an answer."""
    window: int
    """The maximum number of predicted tokens. A sample may have at most window + 1 tokens."""
    limit: int | None
    """The maximum number of samples to encode, or of tokens for plain text. None means no maximum.

    Items are encoded in order until the maximum is reached. The remaining items are left out.
    """
    owner: str
    """The words with which an error message begins, such as "The train text of client anna"."""
    template: ChatTemplate | None = None
    """The chat template; None if the split contains no conversations."""
    split: str = "train"
    """The name of the split: train, validation, test or public."""

    def nothing(self, items: Sequence[Any], fitting: str, kind: str) -> CoterieError:
        """Return the error "{self.owner} has no ..." for a split without any sample.

        Args:
            items: The items of the split. Either all of them are too long, or there are none.
            fitting: The end of the message if all items are too long. It names an item that would
                fit, and a remedy, as in "pair of at most 8 tokens; raise data.window".
            kind: The end of the message if there are no items. It consists of the plural noun for
                an item and a remedy, as in "pairs; add some".
        """
        missing = fitting if items else kind
        if not items and self.split != "public":  # which has a path of its own
            missing += f", or {self.larger_fraction}"
        return CoterieError(f"{self.owner} has no {missing}.")

    @property
    def larger_fraction(self) -> str:
        """The advice in error messages on how to enlarge this split with `data.fractions`."""
        return "lower data.fractions" if self.split == "train" else "raise data.fractions"


class Sample(NamedTuple):
    """A sample as tokens."""

    parts: Sequence[tuple[list[int], bool]]
    """The token ids of each part, and whether the part counts towards the loss.

    The last part is the last answer.
    """
    item: Instruction | Conversation
    """The sample as text."""
    bytes: int = 0
    """The number of UTF-8 bytes of the sample's answers."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the sample."""
        return sum(len(ids) for ids, _ in self.parts)


def samples_of(
    samples: Sequence[Sample],
    too_long: int = 0,
    cut: int = 0,
    template: ChatTemplate | None = None,
) -> Examples:
    """Create a split from samples. The other arguments are fields of `Examples`."""
    parts = [part for sample in samples for part in sample.parts]
    return Examples(
        torch.tensor([id for ids, _ in parts for id in ids], dtype=torch.int32),
        torch.tensor([counts for ids, counts in parts for _ in ids]),
        torch.tensor([sample.tokens for sample in samples]),
        torch.tensor([len(sample.parts[-1][0]) for sample in samples]),
        torch.tensor([sample.bytes for sample in samples]),
        tuple(sample.item for sample in samples),
        too_long,
        cut,
        template,
    )


def with_choices(base: Base, samples: Examples, window: int) -> tuple[Examples, Tensor]:
    """Append one row for each wrong answer choice of each sample.

    The row consists of the sample's prompt and the wrong choice.

    Args:
        base: The base whose tokenizer encodes the choices.
        samples: The samples.
        window: The maximum number of predicted tokens. If a row exceeds window + 1 tokens, the
            end of its choice is cut off. At least one token of the choice is left.

    Returns:
        The samples followed by the added rows; and an int64 tensor shaped (added,), which contains
        for each added row the index of the sample to which the choice belongs.
    """
    owners: list[int] = []
    texts: list[Sequence[str]] = []
    for number, item in enumerate(samples.items):
        others = [choice for choice in dict.fromkeys(item.choices) if choice != item.answer]
        owners += [number] * len(others)
        if isinstance(item, Instruction):
            texts += [replace(item, answer=choice).parts for choice in others]
        elif others:
            assert samples.template is not None, "a conversation needs a chat template"
            *prompt_parts, _ = parts_of(item, samples.template)
            lead, end = samples.template.around
            texts += [[*prompt_parts, f"{lead}{choice}{end}"] for choice in others]
    if not texts:
        return samples, torch.zeros(0, dtype=torch.int64)
    encoder, eos = bare_encoder(base.tokenizer)
    rows: list[Sample] = []
    items = [samples.items[owner] for owner in owners]
    for item, parts in zip(items, PartEncoder(encoder).batch(texts), strict=True):
        *prompt_ids, answer = (part.ids for part in parts)
        prompt = [id for ids in prompt_ids for id in ids]
        if samples.template is None:
            prompt, answer = [base.context_token, *prompt], [*answer, eos]
        prompt = prompt or [base.context_token]
        answer = answer[: window + 1 - len(prompt)]
        rows.append(Sample([(prompt, False), (answer, True)], item))
    return joined([samples, samples_of(rows)]), torch.tensor(owners)


class Scorer(Protocol):
    """The argument of `Split.measured`: a model, the length of a window, and a batch size."""

    @property
    def base(self) -> Base:
        """The model's base."""
        ...

    @property
    def window(self) -> int:
        """The maximum number of tokens that are predicted in a window or a sample."""
        ...

    @property
    def batch(self) -> int:
        """The number of windows, samples or pairs per forward pass."""
        ...

    def losses(self, rows: Examples, batch: int) -> Tensor:
        """Return the loss of each sample, in nats, as a float64 tensor shaped (samples,).

        Args:
            rows: The samples. The loss of a sample is the sum over the tokens of its answers.
            batch: The number of samples per forward pass.
        """
        ...

    def token_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each token in nats, as a float32 tensor shaped (batch, time)."""
        ...

    def texts(self, rows: Examples) -> Sequence[str]:
        """Return the generated answer to each row's prompt, or () if generation is off."""
        ...

"""Prompts with their answers, and conversations, as tokens; the loss counts the answers alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.bases import context_token
from coterie.data.batch import Batch
from coterie.data.chat import ChatTemplate, Conversation
from coterie.data.parts import PartEncoder
from coterie.errors import CoterieError


@dataclass(frozen=True)
class Instruction:
    """A prompt as the model sees it, the answer wanted, and the answers to choose from, if any."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The fields of the record that made the prompt and the answer, where a template did."""
    where: str = field(default="The sample", compare=False, repr=False)
    """The record's place for errors, such as "Client anna: line 3 of notes.jsonl"."""

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return f"{self.prompt}\n{self.answer}"

    @property
    def content(self) -> tuple[str, ...]:
        """The record's own texts, without the template."""
        return self.fields or (self.prompt, self.answer)


@dataclass(frozen=True)
class Examples:
    """Samples, one after another: a first token, the prompt, the answer, the end token; or a
    conversation as its template renders it, to the end of its last answer.

    ids: (N,) int32. starts: (n + 1,) int64, where each sample begins, and N. answers: (n,) int64,
    where each one's last answer begins. counted: (N,) bool, the tokens of all answers with what
    ends them. sizes: (n,) int64, UTF-8 bytes of each one's answers. too_long: how many did not fit.
    cut: how many conversations were cut into several samples. template: of conversations.
    """

    ids: Tensor
    starts: Tensor
    answers: Tensor
    counted: Tensor
    sizes: Tensor
    items: tuple[Instruction | Conversation, ...]
    too_long: int = 0
    cut: int = 0
    template: ChatTemplate | None = None

    def __len__(self) -> int:
        """How many samples."""
        return len(self.items)

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
        bounds = [(int(self.starts[n]), int(self.starts[n + 1])) for n in chosen]
        starts = torch.tensor([0, *(end - start for start, end in bounds)]).cumsum(0)
        inside = self.answers - self.starts[:-1]
        rows = torch.as_tensor(chosen)
        return Examples(
            torch.cat([self.ids[start:end] for start, end in bounds]),
            starts,
            starts[:-1] + inside[rows],
            torch.cat([self.counted[start:end] for start, end in bounds]),
            self.sizes[rows],
            tuple(self.items[n] for n in chosen),
            self.too_long,
            self.cut,
            self.template,
        )

    def sample(self, batch: int, chance: torch.Generator) -> Batch:
        """Samples at random, drawn with replacement."""
        return self.batch(torch.randint(len(self), (batch,), generator=chance))

    def batch(self, chosen: Tensor | range) -> Batch:
        """These samples, padded at their ends to the longest of them."""
        chosen = torch.as_tensor(chosen)
        starts, ends = self.starts[chosen], self.starts[chosen + 1]
        place = torch.arange(int((ends - starts).max()))
        inside = place < (ends - starts)[:, None]
        places = (starts[:, None] + place).clamp(max=len(self.ids) - 1)
        counted = inside & self.counted[places]
        return Batch(self.ids[places].long() * inside, counted[:, 1:], inside[:, 1:])


def joined(parts: Sequence[Examples]) -> Examples:
    """Several clients' samples as one client's."""
    offsets = torch.tensor([0, *(len(part.ids) for part in parts)]).cumsum(0)
    shifted = list(zip(parts, offsets.tolist(), strict=False))
    return Examples(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.starts[:-1] + offset for part, offset in shifted] + [offsets[-1:]]),
        torch.cat([part.answers + offset for part, offset in shifted]),
        torch.cat([part.counted for part in parts]),
        torch.cat([part.sizes for part in parts]),
        tuple(item for part in parts for item in part.items),
        sum(part.too_long for part in parts),
        sum(part.cut for part in parts),
        parts[0].template,
    )


def examples(
    items: Sequence[Instruction],
    encoder: Tokenizer,
    first: int,
    end: int,
    window: int,
    limit: int | None,
    owner: str,
) -> Examples:
    """The samples as tokens; those of more than window + 1 are dropped and counted.

    `limit` keeps so many at most, from the start. `owner` begins an error: "Client anna: its train
    text". Raises CoterieError if none is left.
    """
    encoded = PartEncoder(encoder).batch([split(item) for item in items])
    pairs = [(prompt.ids, answer.ids) for prompt, answer in encoded]
    fits = [len(prompt) + len(answer) + 1 <= window for prompt, answer in pairs]
    kept = [number for number, fit in enumerate(fits) if fit][:limit]
    if not kept:
        raise CoterieError(
            f"{owner} has no sample of at most {window} tokens ({len(items)} are longer); "
            "raise data.window or shorten the template."
            if items
            else f"{owner} has no samples; add text or raise its data.fractions."
        )
    rows = [
        [([first, *prompt], False), ([*answer, end], True)]
        for prompt, answer in (pairs[number] for number in kept)
    ]
    chosen = [items[number] for number in kept]
    sizes = [len(item.answer.encode()) for item in chosen]
    return samples_of(rows, chosen, sizes, len(items) - sum(fits))


def chats(
    items: Sequence[Conversation],
    encoder: Tokenizer,
    template: ChatTemplate,
    window: int,
    limit: int | None,
    owner: str,
) -> Examples:
    """The conversations as tokens, as their template renders them.

    Conversations of more than window + 1 tokens are cut before a turn of the user's into several,
    which all begin with the system prompt; exchanges that are too long are dropped and counted.
    `limit` keeps so many samples at most. Raises CoterieError, which begins with `owner`, if none
    is left.
    """
    ids_of, first = PartEncoder(encoder).ids, context_token(template.tokenizer)
    chosen: list[_Sample] = []
    cut = too_long = 0

    def read(item: Conversation) -> _Sample | None:
        """The conversation with its tokens, unless it is too long."""
        rendered = template.rendered(item)
        texts, said = zip(*rendered.parts, strict=True)
        ids = ids_of(texts)
        ids[0] = ids[0] or [first]  # an answer that nothing comes before
        row = list(zip(ids, said, strict=True))
        fits = sum(len(ids) for ids, _ in row) <= window + 1
        return _Sample(row, item, rendered.bytes) if fits else None

    for item in items:
        if limit is not None and len(chosen) >= limit:
            break
        pieces, lost = _cut(item, read)
        cut, too_long = cut + (len(pieces) > 1), too_long + lost
        chosen += pieces
    if not chosen:
        raise CoterieError(
            f"{owner} has no conversation with an exchange of at most {window + 1} tokens; raise "
            "data.window."
            if items
            else f"{owner} has no conversations; add some or raise its data.fractions."
        )
    rows, kept, sizes = zip(*chosen[:limit], strict=True)
    return replace(samples_of(rows, kept, sizes, too_long, cut), template=template)


class _Sample(NamedTuple):
    """A conversation that fits: its parts' tokens and whether they count, and bytes of answers."""

    row: list[tuple[list[int], bool]]
    item: Conversation
    bytes: int


def _cut(
    item: Conversation, read: Callable[[Conversation], _Sample | None]
) -> tuple[list[_Sample], int]:
    """A conversation in pieces that fit, each as long as it can be; and how many exchanges do
    not."""
    if whole := read(item):
        return [whole], 0
    system, exchanges = item.exchanges()
    pieces: list[_Sample] = []
    lost = 0
    open = False
    for exchange in exchanges:
        alone = replace(item, turns=system + exchange)
        if open and (longer := read(replace(item, turns=pieces[-1].item.turns + exchange))):
            pieces[-1] = longer
        elif piece := read(alone):
            pieces.append(piece)
            open = True
        else:
            lost += 1
            open = False
    return pieces, lost


def samples_of(
    rows: Sequence[Sequence[tuple[list[int], bool]]],
    items: Sequence[Instruction | Conversation],
    sizes: Sequence[int],
    too_long: int,
    cut: int = 0,
) -> Examples:
    """Samples of parts, each its ids and whether they count; the last part is the last answer."""
    parts = [part for row in rows for part in row]
    counted = [said for ids, said in parts for _ in ids]
    starts = torch.tensor([0, *(sum(len(ids) for ids, _ in row) for row in rows)]).cumsum(0)
    last = torch.tensor([len(row[-1][0]) for row in rows])
    return Examples(
        torch.tensor([id for ids, _ in parts for id in ids], dtype=torch.int32),
        starts,
        starts[1:] - last,
        torch.tensor(counted),
        torch.tensor(sizes),
        tuple(items),
        too_long,
        cut,
    )


def parts_of(item: Instruction | Conversation, template: ChatTemplate | None) -> Sequence[str]:
    """Return a sample's prompts and answers in turn, as they are encoded.

    template: of conversations.
    """
    if isinstance(item, Instruction):
        return split(item)
    assert template is not None, "as all conversations"
    return [text for text, _ in template.rendered(item).parts]


def split(item: Instruction) -> tuple[str, str]:
    """Prompt and answer as they are encoded: a space between them belongs to the answer.

    Tokenizers join a space to the word after it. A prompt that ends with a line break needs none.
    """
    prompt = item.prompt.rstrip(" ")
    return prompt, item.answer if prompt.endswith("\n") or not prompt else f" {item.answer}"

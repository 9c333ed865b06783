"""Prompts with their answers, and conversations, as tokens; the loss counts the answers alone."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.bases import context_token
from coterie.data.batch import Batch
from coterie.data.chat import ChatTemplate, Conversation
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
    cut: how many conversations were cut into several samples. around: of conversations, what stands
    before and after a last answer in the same part: a space or nothing, and the marker. markers:
    all that end answers, as some templates have another inside a conversation.
    """

    ids: Tensor
    starts: Tensor
    answers: Tensor
    counted: Tensor
    sizes: Tensor
    items: tuple[Instruction | Conversation, ...]
    too_long: int = 0
    cut: int = 0
    around: tuple[str, str] | None = None
    markers: tuple[str, ...] = ()

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
            self.around,
            self.markers,
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
        parts[0].around,
        parts[0].markers,
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
    prompts, texts = zip(*map(split, items), strict=True) if items else ((), ())
    encoded = (
        encoder.encode_batch(list(prompts), add_special_tokens=False),
        continuing(encoder).encode_batch(list(texts), add_special_tokens=False),
    )
    pairs = [(prompt.ids, answer.ids) for prompt, answer in zip(*encoded, strict=True)]
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
    """The conversations as tokens, as their template renders them, each part encoded on its own.

    So it is when a model writes: what comes before an answer is encoded without it. Conversations
    of more than window + 1 tokens are cut before a turn of the user's into several, which all begin
    with the system prompt; exchanges that are too long are dropped and counted. `limit` keeps so
    many samples at most. Raises CoterieError, which begins with `owner`, if none is left.
    """
    ids_of, first = in_parts(encoder), context_token(template.tokenizer)
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
    return replace(
        samples_of(rows, kept, sizes, too_long, cut),
        around=template.around,
        markers=template.markers,
    )


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


def in_parts(encoder: Tokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """Encodes the parts of a text, each on its own.

    After a token such as <|user|>, some tokenizers begin anew, with a space: a part that follows
    one is encoded with it.
    """
    onwards = continuing(encoder)
    added = tuple(token.content for token in encoder.get_added_tokens_decoder().values())

    def ids(parts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for before, part in zip(["", *parts], parts, strict=False):
            if found and not before.endswith(added):
                found.append(onwards.encode(part, add_special_tokens=False).ids)
                continue
            token = max((one for one in added if before.endswith(one)), key=len, default="")
            whole = encoder.encode(token + part, add_special_tokens=False).ids
            found.append(whole[1:] if token else whole)
        return found

    return ids


def continuing(encoder: Tokenizer) -> Tokenizer:
    """An encoder of text that goes on from other text, such as an answer.

    Some tokenizers, such as Llama-2's, put a space before every text: an answer of its own would
    begin with two.
    """
    described = json.loads(encoder.to_str())
    before = json.dumps(described)
    described["normalizer"] = _without_space(described["normalizer"])
    described["pre_tokenizer"] = _without_space(described["pre_tokenizer"])
    after = json.dumps(described)
    return encoder if after == before else Tokenizer.from_str(after)


def _without_space(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer, as tokenizer.json has it, that puts no space before a text."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            [key] = step.keys() - {"type"}
            parts = (_without_space(part) for part in step[key])
            return {**step, key: [part for part in parts if part is not None]}
    return step


def split(item: Instruction) -> tuple[str, str]:
    """Prompt and answer as they are encoded: a space between them belongs to the answer.

    Tokenizers join a space to the word after it. A prompt that ends with a line break needs none.
    """
    prompt = item.prompt.rstrip(" ")
    return prompt, item.answer if prompt.endswith("\n") or not prompt else f" {item.answer}"

"""Prompts and their answers as tokens; the loss counts the answers alone."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.data.batch import Batch
from coterie.errors import CoterieError


@dataclass(frozen=True)
class Instruction:
    """A prompt as the model sees it, the answer wanted, and the answers to choose from, if any."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Examples:
    """Samples, one after another: a first token, the prompt, the answer, the end token.

    ids: (N,) int32. starts: (n + 1,) int64, where each sample begins, and N. answers: (n,) int64,
    where each answer begins. bytes: UTF-8 bytes of all answers. too_long: how many did not fit.
    """

    ids: Tensor
    starts: Tensor
    answers: Tensor
    bytes: int
    items: tuple[Instruction, ...]
    too_long: int = 0

    def __len__(self) -> int:
        """How many samples."""
        return len(self.items)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each answer, end token included: what a loss or a score is over; (n,) int64."""
        return self.starts[1:] - self.answers

    def only(self, chosen: Sequence[int]) -> "Examples":
        """These samples, in this order."""
        bounds = [(int(self.starts[n]), int(self.starts[n + 1])) for n in chosen]
        starts = torch.tensor([0, *(end - start for start, end in bounds)]).cumsum(0)
        inside = self.answers - self.starts[:-1]
        items = tuple(self.items[n] for n in chosen)
        return Examples(
            torch.cat([self.ids[start:end] for start, end in bounds]),
            starts,
            starts[:-1] + inside[torch.as_tensor(chosen)],
            sum(len(item.answer.encode()) for item in items),
            items,
            self.too_long,
        )

    def sample(self, batch: int, chance: torch.Generator) -> Batch:
        """Samples at random, drawn with replacement."""
        return self.batch(torch.randint(len(self), (batch,), generator=chance))

    def batch(self, chosen: Tensor | range) -> Batch:
        """These samples, padded at their ends to the longest of them."""
        chosen = torch.as_tensor(chosen)
        starts, answers, ends = self.starts[chosen], self.answers[chosen], self.starts[chosen + 1]
        place = torch.arange(int((ends - starts).max()))
        inside = place < (ends - starts)[:, None]
        ids = self.ids[(starts[:, None] + place).clamp(max=len(self.ids) - 1)].long()
        counted = inside & (place >= (answers - starts)[:, None])
        return Batch(ids * inside, counted[:, 1:], inside[:, 1:])


def joined(parts: Sequence[Examples]) -> Examples:
    """Several clients' samples as one client's."""
    offsets = torch.tensor([0, *(len(part.ids) for part in parts)]).cumsum(0)
    shifted = list(zip(parts, offsets.tolist(), strict=False))
    return Examples(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.starts[:-1] + offset for part, offset in shifted] + [offsets[-1:]]),
        torch.cat([part.answers + offset for part, offset in shifted]),
        sum(part.bytes for part in parts),
        tuple(item for part in parts for item in part.items),
        sum(part.too_long for part in parts),
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
    ids: list[int] = []
    starts, answers = [0], []
    for prompt, answer in (pairs[number] for number in kept):
        answers.append(len(ids) + 1 + len(prompt))
        ids += [first, *prompt, *answer, end]
        starts.append(len(ids))
    chosen = tuple(items[number] for number in kept)
    return Examples(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor(answers),
        sum(len(item.answer.encode()) for item in chosen),
        chosen,
        len(items) - sum(fits),
    )


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

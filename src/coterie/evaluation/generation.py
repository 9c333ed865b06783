"""What a model writes after a prompt: the likeliest token each time, many prompts at once."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from coterie.bases import Base, Tokenizer
from coterie.bases.precision import autocast
from coterie.data.examples import Examples
from coterie.data.items import parted


@dataclass(frozen=True)
class Sampling:
    """How a model writes.

    Attributes:
        tokens: the most that are written.
        temperature: 0 takes the likeliest token each time.
        top_p: the nucleus sampling threshold.
        seed: of the tokens that are drawn.
        thinking: whether an answer in a conversation may begin with thinking.
    """

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    thinking: bool = False

    def options(self, ends: Sequence[int]) -> dict[str, Any]:
        """Return options of `generate`; others are left to the base's own configuration."""
        sampled = self.temperature > 0
        drawn = {"temperature": self.temperature, "top_p": self.top_p} if sampled else {}
        return {
            "max_new_tokens": self.tokens,
            "do_sample": sampled,
            "eos_token_id": list(ends),
            "pad_token_id": ends[0],
            **drawn,
        }

    def config(self, ends: Sequence[int]) -> GenerationConfig:
        """Return a whole configuration, which sets aside a base's own (penalties, beam search)."""
        plain = {"num_beams": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
        top_k = 0 if self.temperature > 0 else 50
        return GenerationConfig(use_cache=True, top_k=top_k, **plain | self.options(ends))


def generate_answers(
    base: Base, model: PreTrainedModel, examples: Examples, new_tokens: int, batch: int
) -> list[str]:
    """What the model writes after each sample's prompt; see `continuations`.

    After a conversation, that is up to the marker that ends an answer, and without thinking.
    """
    prompts = examples.prompts(base)
    if examples.template is None:
        return continuations(base, model, prompts, new_tokens, batch)
    texts = continuations(base, model, prompts, new_tokens, batch, examples.markers)
    return [parted(text)[1].strip() for text in texts]


@torch.no_grad()
def continuations(
    base: Base,
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    new_tokens: int,
    batch: int,
    markers: Sequence[str] = (),
) -> list[str]:
    """Greedy text after each prompt, of at most `new_tokens` tokens, up to the end token or to one
    of the markers.

    prompts: each (n,) of any lengths, with a first token to begin from. Less is written where the
    model's context ends. How many are worked on at once (`batch`) does not change the text, save
    where rounding decides between two tokens.
    """
    lengths = [len(prompt) for prompt in prompts]
    written: dict[int, str] = {}
    with autocast(base.precision, base.device.type):
        for numbers, limit in _batches(model, lengths, new_tokens, batch):
            texts = _together(base, model, [prompts[n] for n in numbers], limit, markers)
            written.update(zip(numbers, texts, strict=True))
    return [written[number] for number in range(len(prompts))]


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """The model's `generate` on prompts (batch, time), mask 0 where they are padded: (batch, time +
    new). PEFT's warning is left out that positions are counted, as they are for any prompt."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Position ids are not supported")
        write: Any = model.generate
        return write(input_ids=ids, attention_mask=mask, **options)


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that a model reads, besides a soft prompt (PEFT) of its own; None if it has no end."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if longest is None else longest - _soft_prompt(model)


def _soft_prompt(model: PreTrainedModel) -> int:
    return getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0


def _batches(
    model: PreTrainedModel, lengths: Sequence[int], new_tokens: int, batch: int
) -> Iterator[tuple[list[int], int]]:
    """Prompts of similar lengths, by number, and how many tokens are written after each."""
    room = context_length(model)
    alike = bool(_soft_prompt(model))

    def kind(number: int) -> tuple[int, int]:
        length = lengths[number]
        # The last token that is written is not read.
        limit = new_tokens if room is None else min(new_tokens, room - length + 1)
        # PEFT counts padding between a soft prompt and the text, so there must be none.
        return limit, length if alike else 0

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for (limit, _), same in groupby(order, key=kind):
        numbers = list(same)
        for first in range(0, len(numbers), batch):
            yield numbers[first : first + batch], limit


def ends_of(tokenizer: Tokenizer, markers: Sequence[str]) -> tuple[list[int], list[str]]:
    """Tokens of which each ends an answer: the end token, and those of markers.

    Second, the markers that the vocabulary does not have as tokens of their own: they are to be
    looked for in the text, where they may share a token with what is before them.
    """
    end = tokenizer.eos_token_id
    assert isinstance(end, int), "the tokenizer has an end token, as reading the data checks"
    ends, texts = [end], []
    for marker in markers:
        ids: Any = tokenizer(marker.strip(), add_special_tokens=False)["input_ids"]
        if ids[0] in tokenizer.added_tokens_decoder:
            ends.append(ids[0])
        else:
            texts.append(marker.strip())
    return list(dict.fromkeys(ends)), texts


def _together(
    base: Base,
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    limit: int,
    markers: Sequence[str],
) -> list[str]:
    """The texts after some prompts, which are padded at their beginnings."""
    if limit < 1:
        return [""] * len(prompts)
    tokenizer = base.tokenizer
    ends, stops = ends_of(tokenizer, markers)
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), ends[0])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    until = {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}
    found = generated(
        model,
        ids.to(base.device),
        mask.to(base.device),
        generation_config=Sampling(limit).config(ends),
        **until,
    )
    new = [list(takewhile(lambda id: id not in ends, row)) for row in found[:, longest:].tolist()]
    texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]
    return [before_any(text, stops) for text in texts]


def before_any(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of some markers in it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

"""Text generation from prompts: greedy and batched for evaluation, or sampled."""

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
    """The settings of text generation.

    Attributes:
        tokens: The maximum number of new tokens.
        temperature: The sampling temperature. A temperature of 0 means greedy decoding.
        top_p: The threshold of nucleus sampling.
        seed: The seed for the sampling of tokens.
        thinking: Whether an answer in a conversation is allowed to begin with thinking.
    """

    tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    thinking: bool = False

    def options(self, ends: Sequence[int]) -> dict[str, Any]:
        """Return keyword arguments for `generate`.

        For any other option, `generate` uses the value in the model's generation config.

        Args:
            ends: The token ids that end an answer.
        """
        sampled = self.temperature > 0
        sampling = {"temperature": self.temperature, "top_p": self.top_p} if sampled else {}
        return {
            "max_new_tokens": self.tokens,
            "do_sample": sampled,
            "eos_token_id": list(ends),
            "pad_token_id": ends[0],
            **sampling,
        }

    def config(self, ends: Sequence[int]) -> GenerationConfig:
        """Return a complete generation config.

        The settings of the base's own generation config, such as a repetition penalty or a number
        of beams, are not used.

        Args:
            ends: The token ids that end an answer.
        """
        plain = {"num_beams": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
        top_k = 0 if self.temperature > 0 else 50
        return GenerationConfig(use_cache=True, top_k=top_k, **plain | self.options(ends))


def generate_answers(
    base: Base, model: PreTrainedModel, examples: Examples, new_tokens: int, batch: int
) -> list[str]:
    """Generate an answer to each sample's prompt by greedy decoding; see `continuations`.

    In a conversation, an answer ends before the chat template's end-of-turn marker, and the
    thinking is removed from the answer.
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
    """Decode greedily after each prompt, up to the end token or one of the markers.

    Args:
        base: The base of the model, with its tokenizer.
        model: The model.
        prompts: The token ids of each prompt, as a tensor shaped (n,) with n > 0.
        new_tokens: The maximum number of tokens to generate after a prompt. Fewer tokens are
            generated if the end of the model's context is reached.
        batch: The maximum number of prompts per forward pass. This number does not change the
            texts, except where rounding decides between two tokens.
        markers: Texts that end an answer.

    Returns:
        The text that follows each prompt, without the prompt and without the marker.
    """
    lengths = [len(prompt) for prompt in prompts]
    texts: dict[int, str] = {}
    with autocast(base.precision, base.device.type):
        for numbers, limit in _batches(model, lengths, new_tokens, batch):
            generated_texts = _decode(base, model, [prompts[n] for n in numbers], limit, markers)
            texts.update(zip(numbers, generated_texts, strict=True))
    return [texts[number] for number in range(len(prompts))]


def generated(model: PreTrainedModel, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """Call the model's `generate` on a batch of prompts.

    Args:
        model: The model.
        ids: The token ids of the padded prompts, shaped (batch, time).
        mask: A mask shaped (batch, time), which is 1 for tokens and 0 for padding.
        options: Further keyword arguments of `generate`.

    Returns:
        The token ids of the prompts and the new tokens, shaped (batch, time + new).
    """
    with warnings.catch_warnings():
        # PEFT warns that it ignores position ids; it computes them itself for every prompt.
        warnings.filterwarnings("ignore", message="Position ids are not supported")
        generate: Any = model.generate
        return generate(input_ids=ids, attention_mask=mask, **options)


def context_length(model: PreTrainedModel) -> int | None:
    """Return the maximum length of a model's input in tokens, excluding a PEFT soft prompt.

    The result is None if the model's config sets no maximum.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if longest is None else longest - _soft_prompt(model)


def _soft_prompt(model: PreTrainedModel) -> int:
    return getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0


def _batches(
    model: PreTrainedModel, lengths: Sequence[int], new_tokens: int, batch: int
) -> Iterator[tuple[list[int], int]]:
    """Yield, for each batch, the indices of its prompts and the maximum number of new tokens.

    The prompts of a batch have similar lengths.
    """
    context = context_length(model)
    equal_lengths = bool(_soft_prompt(model))

    def batch_key(number: int) -> tuple[int, int]:
        length = lengths[number]
        # The model does not read the last token that it generates.
        limit = new_tokens if context is None else min(new_tokens, context - length + 1)
        # PEFT counts padding between a soft prompt and the text, so there must be none.
        return limit, length if equal_lengths else 0

    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for (limit, _), group in groupby(order, key=batch_key):
        numbers = list(group)
        for first in range(0, len(numbers), batch):
            yield numbers[first : first + batch], limit


def ends_of(tokenizer: Tokenizer, markers: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the tokens and the texts that end an answer.

    Args:
        tokenizer: The base's tokenizer, with an end token.
        markers: Texts that end an answer, such as a chat template's end-of-turn markers.

    Returns:
        Two lists. The first list contains the ids of the end token and of all markers that are
        single tokens of the vocabulary. The second list contains the texts of all other markers.
        These texts must be searched for in the decoded text, because one token can contain both the
        end of the answer and the beginning of a marker.
    """
    end = tokenizer.eos_token_id
    assert isinstance(end, int), "the tokenizer has no end token"
    ends, texts = [end], []
    for marker in markers:
        ids: Any = tokenizer(marker.strip(), add_special_tokens=False)["input_ids"]
        if ids[0] in tokenizer.added_tokens_decoder:
            ends.append(ids[0])
        else:
            texts.append(marker.strip())
    return list(dict.fromkeys(ends)), texts


def _decode(
    base: Base,
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    limit: int,
    markers: Sequence[str],
) -> list[str]:
    """Generate an answer to each prompt by greedy decoding, in one batch.

    Shorter prompts are padded on the left to the length of the longest prompt.

    Args:
        base: The base of the model, which provides the tokenizer.
        model: The model.
        prompts: The token ids of each prompt, as a tensor shaped (time,).
        limit: The maximum number of tokens of an answer.
        markers: Texts that end an answer, in addition to the tokenizer's end token.

    Returns:
        The text of each answer, without the token or marker that ended it.
    """
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
    stopping = {"stop_strings": stops, "tokenizer": tokenizer} if stops else {}
    sequences = generated(
        model,
        ids.to(base.device),
        mask.to(base.device),
        generation_config=Sampling(limit).config(ends),
        **stopping,
    )
    new_ids = sequences[:, longest:].tolist()
    new = [list(takewhile(lambda id: id not in ends, row)) for row in new_ids]
    texts = [str(tokenizer.decode(row, skip_special_tokens=True)) for row in new]
    return [before_any(text, stops) for text in texts]


def before_any(text: str, stops: Sequence[str]) -> str:
    """Truncate a text before the first occurrence of any of the strings `stops`."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]

"""Encoding of texts that consist of prompts and answers, and assignment of tokens to each part."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.errors import CoterieError

_ENCODERS: WeakKeyDictionary[PreTrainedTokenizerBase, Tokenizer] = WeakKeyDictionary()
"""The encoder of each tokenizer; a copy takes 0.15 seconds if the tokenizer has 50,000 tokens."""


class Part(NamedTuple):
    """The tokens of one part of a text."""

    ids: list[int]
    """The token ids."""
    offsets: list[tuple[int, int]]
    """The positions where each token's characters start and end, relative to the start of the part.

    The start of the first token is negative if that token begins in the previous part.
    """


class PartEncoder:
    """An encoder of texts in which prompts and answers alternate.

    A text is encoded as a whole, so that the tokens do not depend on the boundaries between parts.
    A token that spans the boundary between a prompt and an answer belongs to the answer. A special
    token, such as <|end|>, can absorb the spaces before and after it. The token then belongs to the
    part that contains <|end|> itself, even if the absorbed spaces are in another part.

    Args:
        encoder: A tokenizer that adds no special tokens, as returned by `bare_encoder`.
    """

    def __init__(self, encoder: Tokenizer) -> None:
        self._encoder = encoder
        self._stripping: dict[int, AddedToken] = {
            id: token
            for id, token in encoder.get_added_tokens_decoder().items()
            if token.lstrip or token.rstrip
        }

    def ids(self, parts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each part of a text."""
        [encoded] = self.batch([parts])
        return [part.ids for part in encoded]

    def batch(self, texts: Sequence[Sequence[str]]) -> list[list[Part]]:
        """Encode several texts, and return the tokens of each part of each text."""
        joined = ["".join(parts) for parts in texts]
        encodings = self._encoder.encode_batch(joined, add_special_tokens=False)
        return [
            _divided(encoding.ids, self._offsets(encoding, text), parts)
            for encoding, text, parts in zip(encodings, joined, texts, strict=True)
        ]

    def opening(self, parts: Sequence[str]) -> list[int]:
        """Return the token ids of the prompt, from which a model generates the last part.

        The prompt is all text before the last part. If one token spans the boundary between the
        prompt and the last part, the prompt is encoded on its own, so that the model does not have
        to generate the end of the prompt.
        """
        [[*before, last]] = self.batch([parts])
        if last.offsets and last.offsets[0][0] < 0:
            prompt = "".join(parts[:-1])
            return self._encoder.encode(prompt, add_special_tokens=False).ids
        return [id for part in before for id in part.ids]

    def _offsets(self, encoding: Encoding, text: str) -> list[tuple[int, int]]:
        """Return each token's span of characters, excluding spaces around special tokens."""
        if not self._stripping:
            return encoding.offsets
        return [
            _unstripped(self._stripping.get(id), text, start, end)
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]


def _unstripped(token: AddedToken | None, text: str, start: int, end: int) -> tuple[int, int]:
    """Return the span of a token's own characters, without the spaces that the token has absorbed.

    Args:
        token: The special token if it absorbs spaces, or None for any other token.
        text: The encoded text.
        start: The start of the token's span in the text, including absorbed spaces.
        end: The end of the token's span in the text, including absorbed spaces.
    """
    if token is None or text[start:end].isspace():
        return start, end
    if token.lstrip:
        start = end - len(text[start:end].lstrip())
    if token.rstrip:
        end = start + len(text[start:end].rstrip())
    return start, end


def _divided(
    ids: list[int], offsets: Sequence[tuple[int, int]], parts: Sequence[str]
) -> list[Part]:
    """Divide the tokens of a text among its parts. Every second part is an answer."""
    borders = [0, *accumulate(map(len, parts))]
    places = [0]
    for number, border in enumerate(borders[1:-1], start=1):
        if number % 2:  # the answer begins with the first token that ends inside the answer
            place = bisect_right(offsets, border, key=lambda span: span[1])
        else:
            place = bisect_left(offsets, border, key=lambda span: span[0])
        places.append(max(place, places[-1]))
    return [
        Part(
            ids[first:last], [(start - border, end - border) for start, end in offsets[first:last]]
        )
        for border, (first, last) in zip(borders, pairwise([*places, len(ids)]), strict=False)
    ]


def bare_encoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, int]:
    """Return a tokenizer's encoder without post-processing, and the id of the end-of-text token.

    The encoder is a copy that adds no special tokens, neither truncates nor pads, and does not warn
    about long texts. All calls with a tokenizer return the same copy. The character offsets that
    the encoder returns include the spaces around a token. The post-processors of GPT-2 and similar
    tokenizers would exclude these spaces.

    Raises:
        CoterieError: The tokenizer has no tokenizer.json or no end-of-text token.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CoterieError(
            f"The tokenizer {tokenizer.name_or_path} has no tokenizer.json, which is needed "
            "to map tokens to text; use a base that has one."
        )
    if not isinstance(tokenizer.eos_token_id, int):
        raise CoterieError(
            f"The tokenizer {tokenizer.name_or_path} has no end-of-text token to separate "
            "documents; set eos_token in its tokenizer_config.json."
        )
    if tokenizer not in _ENCODERS:
        encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        _ENCODERS[tokenizer] = encoder
    return _ENCODERS[tokenizer], tokenizer.eos_token_id

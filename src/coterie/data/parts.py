"""Texts of prompts and answers as tokens: which tokens of a text belong to which of its parts."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.errors import CoterieError


class Part(NamedTuple):
    """A part's tokens.

    offsets: the characters of each token, counted from the start of the part.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class PartEncoder:
    """An encoder of texts in parts: a prompt, its answer, the next prompt, its answer and so on.

    A text is encoded as a whole, so its tokens do not depend on where its parts begin. A token with
    characters of a prompt and of an answer belongs to the answer. A special token belongs to the
    part that holds its own text, wherever the spaces are that it strips.
    """

    def __init__(self, encoder: Tokenizer) -> None:
        self._encoder = encoder
        self._stripping: dict[int, AddedToken] = {
            id: token
            for id, token in encoder.get_added_tokens_decoder().items()
            if token.lstrip or token.rstrip
        }

    def ids(self, parts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each part of a text."""
        [encoded] = self.batch([parts])
        return [part.ids for part in encoded]

    def batch(self, texts: Sequence[Sequence[str]]) -> list[list[Part]]:
        """Return the parts of several texts as tokens."""
        wholes = ["".join(parts) for parts in texts]
        encodings = self._encoder.encode_batch(wholes, add_special_tokens=False)
        return [
            _divided(encoding.ids, self._offsets(encoding, whole), parts)
            for encoding, whole, parts in zip(encodings, wholes, texts, strict=True)
        ]

    def opening(self, parts: Sequence[str]) -> list[int]:
        """Return the ids from which a model writes the last part, as they are before that part.

        Where a token holds the end of the prompt and the start of the last part, the prompt is
        encoded on its own, as the model is to write nothing of the prompt.
        """
        [[*before, last]] = self.batch([parts])
        if last.offsets and last.offsets[0][0] < 0:
            prompt = "".join(parts[:-1])
            return self._encoder.encode(prompt, add_special_tokens=False).ids
        return [id for part in before for id in part.ids]

    def _offsets(self, encoding: Encoding, text: str) -> list[tuple[int, int]]:
        """Return the characters of each token, without the spaces that special tokens strip."""
        if not self._stripping:
            return encoding.offsets
        return [
            _unstripped(self._stripping.get(id), text, start, end)
            for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
        ]


def _unstripped(token: AddedToken | None, text: str, start: int, end: int) -> tuple[int, int]:
    """Return the characters of a token without the spaces that it strips."""
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
    """Divide the tokens of a text among its parts; every second part is an answer."""
    borders = [0, *accumulate(map(len, parts))]
    places = [0]
    for number, border in enumerate(borders[1:-1], start=1):
        if number % 2:  # before an answer: its first token is the first that ends within it
            place = bisect_right(offsets, border, key=lambda span: span[1])
        else:
            place = bisect_left(offsets, border, key=lambda span: span[0])
        places.append(max(place, places[-1]))
    return [
        Part(ids[first:last], [(start - at, end - at) for start, end in offsets[first:last]])
        for at, (first, last) in zip(borders, pairwise([*places, len(ids)]), strict=False)
    ]


def bare_encoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, int]:
    """The bare encoder behind a tokenizer, and its end-of-text id.

    The encoder is a copy with nothing after the model: no special tokens, no cutting or padding,
    no warnings on length, and offsets that still count the spaces at a token's ends, which the
    post-processors of GPT-2 and its kin leave out.
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
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.post_processor = None
    encoder.no_truncation()
    encoder.no_padding()
    return encoder, tokenizer.eos_token_id

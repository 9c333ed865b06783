"""Plain text: documents become one stream of tokens.

Documents are encoded one at a time, long ones in chunks, and no further than a limit, so a large
text costs no more than what is kept of it.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.data.examples import Encoding, joined
from coterie.errors import CoterieError

CHUNK = 100_000
"""Characters of a document that are encoded at once."""
BATCH = 64
"""Chunks that are encoded side by side at most, where the machine has several cores."""


@dataclass(frozen=True)
class Tokens:
    """A stream of tokens.

    ids: (N,) int32. bytes: how many UTF-8 bytes of text they stand for; the end-of-text tokens
    between documents stand for none.
    """

    ids: Tensor
    bytes: int


def stream(documents: Sequence[str], how: Encoding, split: str) -> Tokens:
    """Return documents as tokens, the end of text between them, up to the limit.

    Raises CoterieError if the stream has fewer than window + 1 tokens; `split` tells what to
    change.
    """
    tokens, window = _encode(documents, how.encoder, how.ends[1], how.limit), how.window
    if len(tokens.ids) <= window:
        remedy = "lower data.fractions" if split == "train" else "raise data.fractions"
        if how.limit is not None or split == "public":
            remedy = f"raise data.limits.{split}"
        raise CoterieError(
            f"{how.owner} has {len(tokens.ids)} tokens, but a window of {window} needs at least "
            f"{window + 1}; add text, {remedy}, or lower data.window."
        )
    return tokens


def _encode(documents: Iterable[str], encoder: Tokenizer, end: int, limit: int | None) -> Tokens:
    """The documents' tokens until the limit, `end` between them; empty ones are passed over."""
    parts = [_tokens([], 0)]
    room = sys.maxsize if limit is None else limit
    chunks = (
        (number and not place, chunk)
        for number, document in enumerate(filter(None, documents))
        for place, chunk in enumerate(pieces(document, CHUNK))
    )
    size = 1  # doubles, so that a low limit encodes little more than it keeps
    while batch := list(islice(chunks, size)):
        size = min(2 * size, BATCH)
        encodings = encoder.encode_batch_fast(
            [chunk for _, chunk in batch], add_special_tokens=False
        )
        for (after_another, chunk), encoding in zip(batch, encodings, strict=True):
            if after_another:
                parts.append(_tokens([end], 0))
                room -= 1
            if len(encoding.ids) >= room:
                return joined([*parts, _encode_chunk(chunk, encoder, room)])
            parts.append(_tokens(encoding.ids, len(chunk.encode())))
            room -= len(encoding.ids)
    return joined(parts)


def _encode_chunk(chunk: str, encoder: Tokenizer, room: int) -> Tokens:
    """The chunk's first tokens, at most `room` of them.

    A byte-level tokenizer may spell a character with several tokens, which all have that
    character's offsets; the cut goes before such a character, so that the bytes are those of whole
    characters.
    """
    encoding = encoder.encode(chunk, add_special_tokens=False)
    if len(encoding.ids) <= room:
        return _tokens(encoding.ids, len(chunk.encode()))
    offsets = encoding.offsets
    kept = room
    while kept and offsets[kept][0] < offsets[kept - 1][1]:
        kept -= 1
    text = chunk[: offsets[kept - 1][1]] if kept else ""
    return _tokens(encoding.ids[:kept], len(text.encode()))


def _tokens(ids: list[int], size: int) -> Tokens:
    return Tokens(torch.tensor(ids, dtype=torch.int32), size)


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of `size` to twice `size` characters, the last as long as is left.

    A piece ends with a line, or, where there is no end of line, after a space, or else anywhere.
    Joined, the pieces are the text.
    """
    start = 0
    while start < len(text):
        end = _cut(text, start + size, start + 2 * size)
        yield text[start:end]
        start = end


def _cut(text: str, low: int, high: int) -> int:
    """Where to end a piece, between `low` and `high`."""
    if low >= len(text):
        return len(text)
    line = text.find("\n", low - 1, high) + 1
    if line or high >= len(text):
        return line or len(text)
    return text.rfind(" ", low - 1, high) + 1 or high

"""Plain text: documents become one stream of tokens.

Documents are encoded one at a time, long ones in chunks, and no further than a limit, so a large
text costs no more than what is kept of it.
"""

import builtins
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from coterie.data.examples import Encoding, Scorer, even, joined
from coterie.data.files import Record
from coterie.data.items import Instruction
from coterie.data.measured import Measured, finite
from coterie.data.spec import PIECE, TextSpec
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch

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

    @property
    def questions(self) -> tuple[Instruction, ...]:
        """No part of a stream is a question."""
        return ()

    @property
    def beginnings(self) -> None:
        """A stream is read as a whole."""

    @property
    def needs_reference(self) -> bool:
        """A stream is compared with nothing."""
        return False

    def referenced(self, make: Callable[[Any], Any]) -> "Tokens":
        """Return the stream, which needs no reference."""
        return self

    def samples(self, window: int, step: int) -> "Windows":
        """Return windows of window + 1 tokens, one every `step` tokens."""
        if len(self.ids) <= window:
            return Windows(self.ids.new_zeros(0, window + 1))
        return Windows(self.ids.unfold(0, window + 1, step))

    def without(self, taken: Tensor, window: int) -> "Tokens":
        """Return the stream without some of its pieces of window + 1 tokens."""
        inside = torch.zeros(len(self.ids), dtype=torch.bool)
        inside.unfold(0, window + 1, window + 1)[taken] = True
        rest = self.ids[~inside]
        return Tokens(rest, self.bytes * len(rest) // len(self.ids))  # bytes are about right

    def few(self, most: int, window: int, context: int) -> "FewWindows":
        """Return at most so many windows, evenly spaced."""
        return FewWindows(even_windows(self, most, window, context))

    def sample_tokens(self, window: int) -> float:
        """Return the tokens of a window."""
        return window

    def counts(self) -> dict[str, int]:
        """Return nothing: a stream has no samples."""
        return {}

    def compared(self, items: Sequence[Any]) -> Sequence[str]:
        """Return what is compared with other splits: pieces of the documents that were read."""
        found: list[str] = []
        left = self.bytes
        for document in items:
            raw = document.encode()
            parts = list(pieces(raw[:left].decode(errors="ignore"), PIECE))
            found += parts if len(raw) <= left else parts[:-1]
            left -= len(raw)
            if left <= 0:
                break
        return [text for text in found if text.strip()]

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield the tokens."""
        yield self.ids.numpy().tobytes()

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with the windows of the stream.

        Windows do not overlap; the first token of the text is predicted from the base's context
        token, the first of every other window from the token before it.
        """
        nats, counts = [], []
        context = scorer.base.context_token
        for ids, mask in evaluation_windows(self, scorer.window, context, scorer.batch):
            losses = scorer.token_losses(Batch(ids))
            nats.append((losses * mask).sum(1, dtype=torch.float64))
            counts.append(mask.sum(1))
        lengths = torch.cat(counts)
        return Measured(finite(torch.cat(nats), lengths), lengths), {}


@dataclass(frozen=True)
class FewWindows:
    """Windows by which models are compared: one item."""

    batch: Batch
    bytes: int = 0
    """Not counted."""

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return what a model does with all counted tokens together."""
        losses = [scorer.token_losses(part) for part in self.batch.split(scorer.batch)]
        nats = torch.cat(losses).sum(dtype=torch.float64)
        return Measured(nats[None], torch.tensor([self.batch.terms])), {}


@dataclass(frozen=True)
class Windows:
    """Windows of a stream, which may overlap."""

    ids: Tensor
    """(windows, window + 1) int32, a view."""

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    def batch(self, chosen: Tensor) -> Batch:
        """Return the windows with these numbers."""
        return Batch(self.ids[chosen].long())


class Text(TextSpec):
    """Documents, of which a split is one stream of tokens."""

    def used(self) -> set[str]:
        """Return the fields that hold a record's text."""
        return set(self.fields)

    def items(self, records: Iterable[Record]) -> Iterator[str]:
        """Yield the text of every record that is not blank."""
        texts = (record.text(self.fields) for record in records)
        return (text for text in texts if text.strip())

    def encode(self, items: Sequence[str], how: Encoding) -> Tokens:
        """Return documents as tokens, the end of text between them, up to the limit.

        Raises CoterieError if the stream has fewer than window + 1 tokens.
        """
        tokens, window = _encode(items, how.encoder, how.ends[1], how.limit), how.window
        if len(tokens.ids) <= window:
            remedy = "lower data.fractions" if how.split == "train" else "raise data.fractions"
            if how.limit is not None or how.split == "public":
                remedy = f"raise data.limits.{how.split}"
            raise CoterieError(
                f"{how.owner} has {len(tokens.ids)} tokens, but a window of {window} needs at "
                f"least {window + 1}; add text, {remedy}, or lower data.window."
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


def evaluation_windows(
    tokens: Tokens, window: int, context: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows that predict every token of a split exactly once, in order.

    Yields ids (b, window + 1) int64 with b <= batch, and mask (b, window) bool, which is True where
    ids[:, 1:] is a token of the split rather than padding. The token id `context` (beginning or end
    of text) comes before the first token, and is the padding after the last; every later window's
    first input is the last token of the window before. The split must not be empty.
    """
    count = len(tokens.ids)
    rows = -(-count // window)
    stream = torch.full((rows * window + 1,), context, dtype=torch.int64)
    stream[1 : count + 1] = tokens.ids
    ids = stream.unfold(0, window + 1, window)  # (rows, window + 1), overlapping by one token
    mask = (torch.arange(rows * window) < count).view(rows, window)
    yield from zip(ids.split(batch), mask.split(batch), strict=True)


def even_windows(tokens: Tokens, most: int, window: int, context: int) -> Batch:
    """At most so many windows of a stream, as of `evaluation_windows`, evenly spaced from its first
    to its last."""
    [(ids, mask)] = evaluation_windows(tokens, window, context, len(tokens.ids))
    chosen = even(len(ids), most)
    return Batch(ids[chosen], mask[chosen])

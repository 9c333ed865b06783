"""Plain text: documents are encoded as one stream of tokens.

Documents are encoded chunk by chunk until the limit of the split is reached. The cost therefore
depends on the limit rather than on the size of the texts.
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

from coterie.data.examples import Encoding, Scorer, joined
from coterie.data.files import Record
from coterie.data.item_split import even
from coterie.data.items import Instruction
from coterie.data.measured import Measured, finite
from coterie.data.spec import PIECE, TextSpec
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch

CHUNK = 100_000
"""The minimum number of characters in a chunk of a document, except for the last chunk."""
BATCH = 64
"""The maximum number of chunks per call of the tokenizer, which encodes the chunks in parallel."""


@dataclass(frozen=True)
class Tokens:
    """A split of plain text: a stream of N tokens."""

    ids: Tensor
    """The tokens, as an int32 tensor shaped (N,)."""
    bytes: int
    """The number of UTF-8 bytes of the text, without end-of-text tokens between documents."""

    @property
    def questions(self) -> tuple[Instruction, ...]:
        """An empty tuple, because plain text contains no questions with right answers."""
        return ()

    @property
    def beginnings(self) -> None:
        """None, because a stream is read as one text: no window begins a separate text."""

    @property
    def needs_reference(self) -> bool:
        """False, because the loss of plain text does not use a reference model."""
        return False

    def referenced(self, make: Callable[[Any], Any]) -> "Tokens":
        """Return the stream itself, which needs no reference model."""
        return self

    def samples(self, window: int, step: int) -> "Windows":
        """Return all windows of window + 1 tokens that start at a multiple of `step`."""
        if len(self.ids) <= window:
            return Windows(self.ids.new_zeros(0, window + 1))
        return Windows(self.ids.unfold(0, window + 1, step))

    def without(self, taken: Tensor, window: int) -> "Tokens":
        """Return the stream without the tokens of some windows.

        The stream is divided into disjoint windows of window + 1 tokens.

        Args:
            taken: The indices of the windows to leave out.
            window: The number of tokens that are predicted in a window.
        """
        inside = torch.zeros(len(self.ids), dtype=torch.bool)
        inside.unfold(0, window + 1, window + 1)[taken] = True
        rest = self.ids[~inside]
        return Tokens(rest, self.bytes * len(rest) // len(self.ids))  # approximate bytes

    def few(self, most: int, window: int, context: int) -> "FewWindows":
        """Return at most `most` windows, evenly spaced over the stream."""
        return FewWindows(even_windows(self, most, window, context))

    def sample_tokens(self, window: int) -> float:
        """Return the number of tokens that are predicted in a window."""
        return window

    def counts(self) -> dict[str, int]:
        """Return an empty mapping, because a stream has no samples to count."""
        return {}

    def compared(self, items: Sequence[Any]) -> Sequence[str]:
        """Cut the documents into pieces, and return the pieces that are compared for duplicates.

        Blank pieces are left out. If the split has a maximum number of tokens, the stream ends
        after this number of tokens. Pieces that are not completely in the stream are left out, too.

        Args:
            items: The documents from which the stream was encoded.
        """
        texts: list[str] = []
        left = self.bytes
        for document in items:
            raw = document.encode()
            parts = list(pieces(raw[:left].decode(errors="ignore"), PIECE))
            texts += parts if len(raw) <= left else parts[:-1]
            left -= len(raw)
            if left <= 0:
                break
        return [text for text in texts if text.strip()]

    def digested(self) -> Iterator[builtins.bytes]:
        """Yield the tokens as bytes."""
        yield self.ids.numpy().tobytes()

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return the losses of the scorer's model on consecutive windows of the stream.

        The first token of the stream is predicted from the base's context token, which is the
        beginning-of-text token or, if there is none, the end-of-text token. The first token of
        every later window is predicted from the last token of the previous window.
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
    """A few windows of a stream, on which models are compared."""

    batch: Batch
    bytes: int = 0
    """Always 0, because the UTF-8 bytes of the windows are not counted."""

    def measured(self, scorer: Scorer) -> tuple[Measured, dict[str, float]]:
        """Return the total loss of the scorer's model on all windows.

        The result contains a single loss, as if all windows together were one item.
        """
        losses = [scorer.token_losses(part) for part in self.batch.split(scorer.batch)]
        nats = torch.cat(losses).sum(dtype=torch.float64)
        return Measured(nats[None], torch.tensor([self.batch.terms])), {}


@dataclass(frozen=True)
class Windows:
    """Windows of a stream. The windows can overlap."""

    ids: Tensor
    """The token ids of all windows, as a view of the stream.

    The tensor is int32 and shaped (windows, window + 1).
    """

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    def batch(self, chosen: Tensor) -> Batch:
        """Return the windows with the indices `chosen`."""
        return Batch(self.ids[chosen].long())


class Text(TextSpec):
    """Documents. The documents of a split are encoded as one stream of tokens."""

    def used(self) -> set[str]:
        return set(self.fields)

    def items(self, records: Iterable[Record]) -> Iterator[str]:
        # Plain text skips blank records, which other kinds of data refuse.
        texts = (record.text(self.fields) for record in records)
        return (text for text in texts if text.strip())

    def encode(self, items: Sequence[str], how: Encoding) -> Tokens:
        tokens, window = _encode(items, how.encoder, how.ends[1], how.limit), how.window
        if len(tokens.ids) <= window:
            remedy = how.larger_fraction
            if how.limit is not None or how.split == "public":
                remedy = f"raise data.limits.{how.split}"
            raise CoterieError(
                f"{how.owner} has {len(tokens.ids)} tokens, but a window of {window} needs at "
                f"least {window + 1}; add text, {remedy}, or lower data.window."
            )
        return tokens


def _encode(documents: Iterable[str], encoder: Tokenizer, end: int, limit: int | None) -> Tokens:
    """Encode non-empty documents as one stream.

    Args:
        documents: The documents.
        encoder: A tokenizer that adds no special tokens.
        end: The id of the token that separates two documents.
        limit: The maximum number of tokens, or None for no limit.
    """
    parts = [_tokens([], 0)]
    left = sys.maxsize if limit is None else limit
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
                left -= 1
            if len(encoding.ids) >= left:
                return joined([*parts, _encode_chunk(chunk, encoder, left)])
            parts.append(_tokens(encoding.ids, len(chunk.encode())))
            left -= len(encoding.ids)
    return joined(parts)


def _encode_chunk(chunk: str, encoder: Tokenizer, limit: int) -> Tokens:
    """Return the first tokens of a chunk, but at most `limit` tokens.

    A byte-level tokenizer can encode one character as several tokens, each of which has the offsets
    of that character. The returned tokens never end in the middle of a character, so that the bytes
    of the encoded text can be counted.
    """
    encoding = encoder.encode(chunk, add_special_tokens=False)
    if len(encoding.ids) <= limit:
        return _tokens(encoding.ids, len(chunk.encode()))
    offsets = encoding.offsets
    kept = limit
    while kept and offsets[kept][0] < offsets[kept - 1][1]:
        kept -= 1
    text = chunk[: offsets[kept - 1][1]] if kept else ""
    return _tokens(encoding.ids[:kept], len(text.encode()))


def _tokens(ids: list[int], size: int) -> Tokens:
    return Tokens(torch.tensor(ids, dtype=torch.int32), size)


def pieces(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of at least `size` and at most twice `size` characters.

    Only the last piece can be shorter. A piece ends after a newline if possible, or else after a
    space, or else anywhere. The concatenation of all pieces equals the text.
    """
    start = 0
    while start < len(text):
        end = _cut(text, start + size, start + 2 * size)
        yield text[start:end]
        start = end


def _cut(text: str, low: int, high: int) -> int:
    """Return the character position at which to end a piece.

    The position is between `low` and `high`, or at the end of the text if the text ends earlier.
    """
    if low >= len(text):
        return len(text)
    line = text.find("\n", low - 1, high) + 1
    if line or high >= len(text):
        return line or len(text)
    return text.rfind(" ", low - 1, high) + 1 or high


def evaluation_windows(
    tokens: Tokens, window: int, context: int, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of windows in which every token of a stream is predicted once, in order.

    Each window begins with the last token of the previous window. The first window begins with
    `context`.

    Args:
        tokens: The stream, which must not be empty.
        window: The number of tokens that are predicted in a window.
        context: The id of a beginning-of-text or end-of-text token. The token is inserted before
            the first token of the stream, and is used to pad the last window.
        batch: The maximum number of windows per batch.

    Yields:
        The token ids `ids` and a mask. The token ids are an int64 tensor shaped (b, window + 1),
        with b <= batch. The mask is a bool tensor shaped (b, window), which is True where
        ids[:, 1:] is a token of the stream rather than padding.
    """
    count = len(tokens.ids)
    rows = -(-count // window)
    stream = torch.full((rows * window + 1,), context, dtype=torch.int64)
    stream[1 : count + 1] = tokens.ids
    ids = stream.unfold(0, window + 1, window)  # (rows, window + 1), overlapping by one token
    mask = (torch.arange(rows * window) < count).view(rows, window)
    yield from zip(ids.split(batch), mask.split(batch), strict=True)


def even_windows(tokens: Tokens, most: int, window: int, context: int) -> Batch:
    """Return at most `most` of the windows of `evaluation_windows`, evenly spaced."""
    [(ids, mask)] = evaluation_windows(tokens, window, context, len(tokens.ids))
    chosen = even(len(ids), most)
    return Batch(ids[chosen], mask[chosen])

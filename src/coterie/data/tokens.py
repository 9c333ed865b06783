"""From documents to tokens: one stream of ids per split, and the bytes of text that it stands for.

Prompts with answers, and conversations, stay samples of their own (`Examples`).
Documents are encoded one at a time, long ones in chunks, and no further than the split's limit, so
a large text costs no more than what is kept of it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.bases import context_token
from coterie.data.chat import chat_template
from coterie.data.control import control_tokens, has_conversations, refuse_control
from coterie.data.examples import Examples, chats, examples, joined
from coterie.data.files import read_documents
from coterie.data.instructions import field_records
from coterie.data.pairs import Pairs, joined_pairs, pairs
from coterie.data.spec import DataSpec
from coterie.data.texts import SPLITS, Texts, items_by_split, pieces
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


Split = Tokens | Examples | Pairs
"""A text as one stream of tokens, or prompts with answers or conversations as samples, or pairs of
them."""


@dataclass(frozen=True)
class ClientData:
    """A client's three splits as tokens."""

    train: Split
    validation: Split
    test: Split


def tokenise(
    texts: Texts[Any], tokenizer: PreTrainedTokenizerBase, data: DataSpec, name: str
) -> ClientData:
    """The client's texts as tokens, with end-of-text between documents and limits applied.

    With `data.instructions` and its kin, `texts` become samples, or pairs of them. Raises
    `CoterieError` if a split of the client `name` holds fewer than window + 1 tokens, or no sample
    that fits the window, or if the tokenizer cannot be used.
    """
    splits = {}
    for split in SPLITS:
        owner = f"Client {name}: its {split} text"
        splits[split] = encoded(getattr(texts, split), tokenizer, data, split, owner)
    return ClientData(**splits)


def encoded(
    items: Sequence[Any], tokenizer: PreTrainedTokenizerBase, data: DataSpec, split: str, owner: str
) -> Split:
    """Documents or samples, up to the limit of a split (or public).

    Raises `CoterieError` as `tokenise` does; `owner` begins it: "The public text".
    """
    encoder, end = bare_encoder(tokenizer)
    limit = getattr(data.limits, split)
    chat = data.chats or has_conversations(items)
    template = chat_template(tokenizer, data.chat_template) if chat else None
    if data.special_tokens == "refuse":
        refuse_control(items, control_tokens(tokenizer, template), owner)
    if data.preferences is not None:
        ends = context_token(tokenizer), end
        return pairs(items, encoder, ends, template, data.window, limit, owner)
    if template is not None:
        return chats(items, encoder, template, data.window, limit, owner)
    if data.instructions is not None:
        first = context_token(tokenizer)
        return examples(items, encoder, first, end, data.window, limit, owner)
    tokens = _encode(items, encoder, end, limit)
    remedy = "lower data.fractions" if split == "train" else "raise data.fractions"
    if limit is not None or split == "public":
        remedy = f"raise data.limits.{split}"
    _suffice(tokens.ids, data.window, owner, remedy)
    return tokens


def whole_text(path: str, data: DataSpec, root: Path, owner: str) -> list[Any]:
    """All documents or samples of a file or folder.

    Raises `CoterieError`, which begins with `owner`, if it cannot be read.
    """
    if data.samples:
        return items_by_split({"": field_records(root, path, owner)}, data)[""]
    return [document.text for document in read_documents(root, path, data.fields, owner)]


def _suffice(ids: Tensor, window: int, text: str, remedy: str) -> None:
    if len(ids) <= window:
        raise CoterieError(
            f"{text} has {len(ids)} tokens, but a window of {window} needs at least "
            f"{window + 1}; add text, {remedy}, or lower data.window."
        )


def pooled(datas: Sequence[ClientData], public: Split | None = None) -> ClientData:
    """All clients' tokens as one client's, for centralised training; each split is concatenated.

    `public` is trained on, too.
    """
    splits = {split: [getattr(data, split) for data in datas] for split in SPLITS}
    splits["train"] += [] if public is None else [public]
    return ClientData(**{split: _pooled(parts) for split, parts in splits.items()})


def _pooled(parts: Sequence[Split]) -> Split:
    if compared := [part for part in parts if isinstance(part, Pairs)]:
        return joined_pairs(compared, joined([part.both for part in compared]))
    samples = [part for part in parts if isinstance(part, Examples)]
    return joined(samples) if samples else _joined([p for p in parts if isinstance(p, Tokens)])


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(torch.cat([part.ids for part in parts]), sum(part.bytes for part in parts))


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
                return _joined([*parts, _encode_chunk(chunk, encoder, room)])
            parts.append(_tokens(encoding.ids, len(chunk.encode())))
            room -= len(encoding.ids)
    return _joined(parts)


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

"""From documents to tokens: one stream of ids per split, and the bytes of text that it stands for.

Prompts with answers stay samples of their own (`Examples`).
Documents are encoded one at a time, long ones in chunks, and no further than the split's limit, so
a large text costs no more than what is kept of it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.base import context_token
from coterie.data.examples import Examples, examples, joined
from coterie.data.files import read_documents
from coterie.data.instructions import field_records, instructions
from coterie.data.spec import DataSpec
from coterie.data.texts import SPLITS, Texts, pieces
from coterie.errors import CoterieError

CHUNK = 100_000
"""Characters of a document that are encoded at once."""


@dataclass(frozen=True)
class Tokens:
    """A stream of tokens.

    ids: (N,) int32. bytes: how many UTF-8 bytes of text they stand for; the end-of-text tokens
    between documents stand for none.
    """

    ids: Tensor
    bytes: int


Split = Tokens | Examples
"""A text as one stream of tokens, or prompts with answers as samples."""


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

    With `data.instructions`, `texts` are instructions, and become samples. Raises `CoterieError` if
    a split of the client `name` holds fewer than window + 1 tokens, or no sample that fits the
    window, or if the tokenizer cannot be used.
    """
    encoder, end = _encoder(tokenizer)
    splits: dict[str, Split] = {}
    for split in SPLITS:
        items, limit = getattr(texts, split), getattr(data.limits, split)
        owner = f"Client {name}: its {split} text"
        if data.instructions is None:
            splits[split] = _encode(items, encoder, end, limit)
            remedy = "its data.limits or data.fractions"
            _suffice(splits[split].ids, data.window, owner, remedy)
        else:
            first = context_token(tokenizer)
            splits[split] = examples(items, encoder, first, end, data.window, limit, owner)
    return ClientData(**splits)


def public_tokens(data: DataSpec, root: Path, tokenizer: PreTrainedTokenizerBase) -> Split | None:
    """The text that everybody may see, whole, up to its limit; None where the run has none.

    Raises `CoterieError` as `tokenise` does, or if it cannot be read.
    """
    if data.public is None:
        return None
    owner, limit = "The public text", data.limits.public
    encoder, end = _encoder(tokenizer)
    if data.instructions is not None:
        items = instructions(field_records(root, data.public, owner), data.instructions)
        first = context_token(tokenizer)
        return examples(items, encoder, first, end, data.window, limit, owner)
    documents = [d.text for d in read_documents(root, data.public, data.fields, owner)]
    tokens = _encode(documents, encoder, end, limit)
    _suffice(tokens.ids, data.window, owner, "data.limits.public")
    return tokens


def _suffice(ids: Tensor, window: int, text: str, remedy: str) -> None:
    if len(ids) <= window:
        raise CoterieError(
            f"{text} has {len(ids)} tokens, but a window of {window} needs at least"
            f" {window + 1}; give it more text, raise {remedy}, or set a smaller data.window."
        )


def pooled(datas: Sequence[ClientData]) -> ClientData:
    """All clients' tokens as one client's, for centralised training; each split is concatenated."""
    return ClientData(**{split: _pooled([getattr(d, split) for d in datas]) for split in SPLITS})


def _pooled(parts: Sequence[Split]) -> Split:
    samples = [part for part in parts if isinstance(part, Examples)]
    return joined(samples) if samples else _joined([p for p in parts if isinstance(p, Tokens)])


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return Tokens(torch.cat([part.ids for part in parts]), sum(part.bytes for part in parts))


def _encoder(tokenizer: PreTrainedTokenizerBase) -> tuple[Tokenizer, int]:
    """The bare encoder behind a tokenizer, and its end-of-text id.

    The encoder is a copy with nothing after the model: no special tokens, no cutting or padding,
    no warnings on length, and offsets that still count the spaces at a token's ends, which the
    post-processors of GPT-2 and its kin leave out.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CoterieError(
            f"The tokenizer {tokenizer.name_or_path} has no tokenizer.json, which is needed to"
            " map its tokens to the text; take a base that has one."
        )
    if not isinstance(tokenizer.eos_token_id, int):
        raise CoterieError(
            f"The tokenizer {tokenizer.name_or_path} has no end-of-text token to put between"
            " documents; set eos_token in its tokenizer_config.json."
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
    for number, document in enumerate(filter(None, documents)):
        if number:
            parts.append(_tokens([end], 0))
            room -= 1
        for chunk in pieces(document, CHUNK):
            part = _encode_chunk(chunk, encoder, room)
            parts.append(part)
            room -= len(part.ids)
            if room == 0 or part.bytes < len(chunk.encode()):
                return _joined(parts)
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

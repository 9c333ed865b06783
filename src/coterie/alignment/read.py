"""Vocabularies from files: of the Hugging Face, GPT-2's, SentencePiece's and tiktoken's kinds."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coterie.alignment.vocabulary import (
    SPACE,
    Vocabulary,
    byte_level,
    byte_piece,
    roles_of,
    spelled,
)
from coterie.bases import EMBEDDED, load_tokenizer
from coterie.errors import CoterieError
from coterie.files import parse_json

UNKNOWN, CONTROL, UNUSED, BYTE = 2, 3, 5, 6
"""Types of SentencePiece's tokens; the others are text."""


def read_vocabulary(tokenizer: str | Path) -> Vocabulary:
    """The vocabulary of a tokenizer: an embedded base, a folder, a file, or a name on the hub.

    A file, or one in the folder, is tokenizer.json, vocab.json (byte-level BPE's), tokenizer.model
    (SentencePiece's) or NAME.tiktoken. Raises CoterieError for what cannot be read.
    """
    path = Path(tokenizer)
    if not path.exists() or (EMBEDDED / path / "config.json").exists():
        return _loaded(str(tokenizer))
    if (path / "tokenizer.json").exists() and (path / "tokenizer_config.json").exists():
        return _loaded(str(path.resolve()))  # the second file names the roles
    file = _file(path)
    try:
        if file.suffix == ".model":
            return _sentencepiece(file.read_bytes())
        if file.suffix == ".tiktoken":
            return _tiktoken(file.read_bytes())
        content = parse_json(file.read_bytes())
        if isinstance(content.get("model"), dict):
            return Vocabulary.of(Tokenizer.from_file(str(file)))
        return _vocab_json(content)
    except OSError:
        raise
    # The tokenizers library raises plain exceptions; the readers below what their steps raise.
    except Exception as error:
        raise CoterieError(
            f"No vocabulary could be read from {file}: the file is damaged or has a different "
            "format; download the tokenizer again."
        ) from error


def _loaded(name: str) -> Vocabulary:
    try:
        tokenizer = load_tokenizer(name)
    except CoterieError as error:
        raise CoterieError(
            f"No tokenizer could be loaded from {name!r}: it is neither a tokenizer's file or "
            "folder, nor a built-in base, nor a model on the Hugging Face hub."
        ) from error
    return Vocabulary.of(tokenizer)


def _file(path: Path) -> Path:
    if path.is_dir():
        known = [path / name for name in ("tokenizer.json", "vocab.json", "tokenizer.model")]
        found = [file for file in known if file.exists()] or sorted(path.glob("*.tiktoken"))
    else:
        found = [path] if path.suffix in (".json", ".model", ".tiktoken") else []
    if not found:
        raise CoterieError(
            f"{path} contains no tokenizer; give a tokenizer.json, vocab.json, "
            "tokenizer.model or NAME.tiktoken, or a folder that contains one."
        )
    return found[0]


def _vocab_json(ids: dict[str, int]) -> Vocabulary:
    """Ids by token, in GPT-2's stand-ins for bytes."""
    return spelled({i: byte_level(token) for token, i in ids.items()}, (), roles_of(ids))


def _tiktoken(data: bytes) -> Vocabulary:
    """Lines of a token's bytes in base64 and its id; such files hold no special tokens."""
    lines = (line.split() for line in data.splitlines() if line)
    return spelled({int(i): base64.b64decode(token, validate=True) for token, i in lines}, (), {})


def _sentencepiece(data: bytes) -> Vocabulary:
    """A model's tokens: https://github.com/google/sentencepiece, sentencepiece_model.proto.

    Field 1 is repeated, a token each, of which field 1 is the text and field 3 the type (1 if it
    is not there).
    """
    spellings: dict[int, bytes] = {}
    special: dict[str, int] = {}
    fallback: list[int] = []
    empty: list[int] = []
    pieces = (value for number, value in _fields(data) if number == 1)
    for i, piece in enumerate(pieces):
        fields = dict(_fields(piece))
        text, kind = fields[1].decode(), fields.get(3, 1)
        spellings[i] = text.replace(SPACE, " ").encode()
        if kind in (UNKNOWN, CONTROL):
            special[text] = i
        elif kind == UNUSED:
            empty.append(i)
        elif kind == BYTE:
            fallback.append(i)
            spellings[i] = byte_piece(text) or spellings[i]
    if not spellings:
        raise ValueError("a model without tokens")
    return spelled(spellings, (*special.values(), *empty), roles_of(special), fallback)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """A protobuf message's fields: number, and an int or bytes.

    https://protobuf.dev/programming-guides/encoding/; raises ValueError if data end too soon.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("data end within a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place after it."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("data end within a number")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte < 0x80:
            return value, at

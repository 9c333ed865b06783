"""The vocabularies of GPT-2, Llama 2 and Qwen, read from their own files."""

import base64
from pathlib import Path
from typing import Any, cast

from transformers.convert_slow_tokenizer import import_protobuf

from coterie.alignment import Vocabulary, read_vocabulary
from coterie.alignment.vocabulary import SPACE, byte_piece, roles_of, spelled

REAL = Path(__file__).parents[3] / "shared" / "tokenizers"
UNKNOWN, CONTROL, BYTE = 2, 3, 6
"""Types of a SentencePiece model's tokens; the other types are text."""


def real_vocabulary(name: str) -> Vocabulary:
    """Read gpt2, llama2 or qwen."""
    return {"gpt2": read_vocabulary, "llama2": _sentencepiece, "qwen": _tiktoken}[name](REAL / name)


def _tiktoken(folder: Path) -> Vocabulary:
    lines = (line.split() for line in (folder / "qwen.tiktoken").read_bytes().splitlines())
    return spelled({int(i): base64.b64decode(token) for token, i in lines}, (), {})


def _sentencepiece(folder: Path) -> Vocabulary:
    protobuf = cast("Any", import_protobuf())
    model = protobuf.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    pieces = model.pieces
    special = {p.piece: i for i, p in enumerate(pieces) if p.type in (UNKNOWN, CONTROL)}
    fallback = [i for i, p in enumerate(pieces) if p.type == BYTE]
    spellings = {i: p.piece.replace(SPACE, " ").encode() for i, p in enumerate(pieces)}
    spellings |= {i: byte_piece(pieces[i].piece) or b"" for i in fallback}
    return spelled(spellings, special.values(), roles_of(special), fallback)

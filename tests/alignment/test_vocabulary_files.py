"""Vocabularies from files: each kind written here, and what is none."""

import base64
import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coterie.alignment import Vocabulary, read_vocabulary
from coterie.alignment.vocabulary import byte_level
from coterie.bases import EMBEDDED, load_tokenizer
from coterie.errors import CoterieError

REAL = Path(__file__).parents[3] / "shared" / "tokenizers"


def varint(value: int) -> bytes:
    groups = []
    while value > 0x7F:
        groups.append(0x80 | value & 0x7F)
        value >>= 7
    return bytes([*groups, value])


def field(number: int, value: bytes | int | float) -> bytes:
    """A field as protobuf writes it: a number, a 32-bit float, or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece(*pieces: tuple[str, int | None]) -> bytes:
    """A model of pieces with their types, and a trainer's and a normaliser's fields after them."""
    model = b""
    for text, kind in pieces:
        piece = field(1, text.encode()) + field(2, -1.5)
        model += field(1, piece if kind is None else piece + field(3, kind))
    return model + field(2, field(4, 32_000)) + varint(77 << 3 | 1) + bytes(8)


PIECES = (
    ("<unk>", 2),
    ("<s>", 3),
    ("</s>", 3),
    ("<0x0A>", 6),
    ("<0x41>", 6),
    ("▁▁the" + "e" * 200, None),
    ("A", 1),
    ("<0x0B>", 1),
    ("mine", 4),
    ("gone", 5),
)
TOKENS = (
    *(None, None, None, b"\n", None),
    *(b"  the" + b"e" * 200, b"A", b"<0x0B>", b"mine", None),
)


def test_a_sentencepiece_model(tmp_path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(*PIECES))
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.tokens == TOKENS
    assert vocabulary.roles == {"bos": 1, "eos": 2, "unk": 0}
    assert read_vocabulary(tmp_path / "tokenizer.model") == vocabulary


def test_a_sentencepiece_model_that_ends_too_soon(tmp_path) -> None:
    whole = sentencepiece(*PIECES)
    path = tmp_path / "tokenizer.model"
    first = len(sentencepiece(PIECES[0])) - len(sentencepiece())
    for size in (0, 1, first - 1, first + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CoterieError, match=r"tokenizer\.model: the file is damaged"):
            read_vocabulary(path)


def test_a_tiktoken_file(tmp_path) -> None:
    tokens = [b"a", b"\xff\x00", b" the", b"\n"]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    (tmp_path / "some.tiktoken").write_text("\n".join(reversed(lines)) + "\n")
    vocabulary = read_vocabulary(str(tmp_path))
    assert vocabulary.tokens == tuple(tokens)
    assert vocabulary.roles == {}


def test_a_vocab_json_is_byte_level(tmp_path) -> None:
    ids = {"a": 0, "Ġthe": 1, "Ċ": 3, "Ã©": 4, "model": 5, "<|endoftext|>": 6}
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    vocabulary = read_vocabulary(tmp_path)
    assert vocabulary.tokens == (b"a", b" the", None, b"\n", "é".encode(), b"model", None)
    assert vocabulary.roles == {"eos": 6}


def test_stand_ins_are_those_of_the_tokenizers_library() -> None:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    seen = set()
    for text in ("".join(map(chr, range(0x800))), "東京", "🦉", "\U000fffff\U0010ffff"):
        ((token, _),) = split.pre_tokenize_str(text)
        assert byte_level(token) == text.encode()
        seen.update(token)
    assert len(seen) > 200
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(byte_level(c) for c in alphabet) == [bytes([byte]) for byte in range(256)]
    assert byte_level("東") == "東".encode()  # no stand-in


def test_a_folder_of_a_base_gives_what_its_tokenizer_gives(bases, tmp_path) -> None:
    expected = Vocabulary.of(load_tokenizer("tiny-gpt2"))
    assert read_vocabulary("tiny-gpt2") == expected
    assert read_vocabulary(EMBEDDED / "tiny-gpt2") == expected
    llama = str(bases / "llama")
    assert read_vocabulary(llama) == Vocabulary.of(load_tokenizer(llama))
    alone = tmp_path / "tokenizer.json"
    alone.write_bytes((EMBEDDED / "tiny-gpt2" / "tokenizer.json").read_bytes())
    assert read_vocabulary(tmp_path).tokens == read_vocabulary(alone).tokens == expected.tokens


def test_what_cannot_be_read_is_one_sentence(tmp_path) -> None:
    files = {
        "tokenizer.json": '{"model": {"type": "new"}}',
        "list.json": "[1, 2]",
        "words.json": '{"a": "b"}',
        "cut.json": '{"a": 0',
        "bad.tiktoken": "not-base64! 0",
        "short.tiktoken": "YQ==",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(
            CoterieError, match="the file is damaged or has a different format"
        ) as said:
            read_vocabulary(tmp_path / name)
        assert str(tmp_path / name) in str(said.value)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for place in ("notes.txt", "empty"):
        with pytest.raises(CoterieError, match=r"contains no tokenizer; give a tokenizer.json"):
            read_vocabulary(tmp_path / place)


def test_a_name_that_is_nowhere(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("coterie.bases.loading.HfApi", lambda: None)  # no network
    with pytest.raises(CoterieError, match="No tokenizer could be loaded from 'nobody/nothing'"):
        read_vocabulary("nobody/nothing")


def test_a_saved_tokenizer_reads_as_it_was(tmp_path) -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert read_vocabulary(tmp_path) == Vocabulary.of(tokenizer)


@pytest.mark.skipif(not REAL.exists(), reason="the real tokenizers are not here")
def test_real_vocabularies() -> None:
    gpt2, llama, qwen = (read_vocabulary(REAL / name) for name in ("gpt2", "llama2", "qwen"))
    assert [len(v.tokens) for v in (gpt2, llama, qwen)] == [50_257, 32_000, 151_643]
    assert gpt2.tokens[262] == llama.tokens[278] == b" the"
    assert llama.tokens[13] == b"\n"
    assert llama.roles == {"bos": 1, "eos": 2, "unk": 0}
    assert gpt2.roles == {"eos": 50_256}
    for vocabulary in (gpt2, llama, qwen):
        assert set(vocabulary.tokens) >= {bytes([byte]) for byte in range(256)}

"""Vocabularies from files: each kind written here, and what is none."""

import json

import pytest
from real_vocabularies import REAL, real_vocabulary
from tokenizers import pre_tokenizers

from coterie.alignment import Vocabulary, read_vocabulary
from coterie.alignment.vocabulary import byte_level
from coterie.bases import EMBEDDED, load_tokenizer
from coterie.errors import CoterieError


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
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(CoterieError, match="damaged or has a different format") as refusal:
            read_vocabulary(tmp_path / name)
        assert str(tmp_path / name) in str(refusal.value)


def test_other_formats_are_refused_in_a_sentence_that_says_what_to_do(tmp_path) -> None:
    (tmp_path / "some.tiktoken").write_text("YQ== 0")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.model").write_bytes(b"neither SentencePiece nor tiktoken")
    (tmp_path / "empty").mkdir()
    for place, words in (
        ("some.tiktoken", r"some\.tiktoken is not a tokenizer\.json or a vocab\.json"),
        ("model", "No tokenizer could be read from .*model"),
        ("empty", "No tokenizer could be read from .*empty"),
    ):
        with pytest.raises(CoterieError, match=words + "; download the tokenizer.json"):
            read_vocabulary(tmp_path / place)


def test_a_name_that_is_nowhere(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("coterie.bases.loading.HfApi", lambda: None)  # no network
    with pytest.raises(CoterieError, match="No tokenizer could be loaded from 'nobody/nothing'"):
        read_vocabulary("nobody/nothing")


@pytest.mark.skipif(not REAL.exists(), reason="the real tokenizers are not here")
def test_real_vocabularies() -> None:
    gpt2, qwen, llama = (real_vocabulary(name) for name in ("gpt2", "qwen", "llama2"))
    assert [len(v.tokens) for v in (gpt2, llama, qwen)] == [50_257, 32_000, 151_643]
    assert gpt2.tokens[262] == llama.tokens[278] == b" the"
    assert llama.tokens[13] == b"\n"
    assert llama.roles == {"bos": 1, "eos": 2, "unk": 0}
    assert gpt2.roles == {"eos": 50_256}
    for vocabulary in (gpt2, llama, qwen):
        assert set(vocabulary.tokens) >= {bytes([byte]) for byte in range(256)}


@pytest.mark.skipif(not REAL.exists(), reason="the real tokenizers are not here")
def test_a_sentencepiece_model_is_read_where_its_library_is_installed() -> None:
    pytest.importorskip("sentencepiece")
    assert read_vocabulary(REAL / "llama2") == real_vocabulary("llama2")

"""Each family's tokens as bytes, from tokenizers in memory."""

import random

import pytest
from in_memory import byte_level_bpe
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from coterie.alignment import Vocabulary
from coterie.bases import load_tokenizer
from coterie.errors import CoterieError

TEXT = ["the cat ate the hat, naïve as ever\n", "the hats of the cat's — 東京\n"]
WILD = "the hat,  the naïve cat — 東京!\n\tof 🦉"


def byte_level() -> Tokenizer:
    return byte_level_bpe(TEXT, 300, "<|endoftext|>")


def llama() -> Tokenizer:
    """Return a tokenizer in SentencePiece's style: U+2581 for spaces, and 256 byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "t", "h", "e", "▁t", "▁th", "▁the", "he", "A", "ï"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, llama])
def test_a_texts_tokens_spell_the_text(make) -> None:
    tokenizer = make()
    tokens = Vocabulary.of(tokenizer).tokens
    assert len(tokens) == tokenizer.get_vocab_size()
    for text in (*TEXT, WILD, "", " ", "<0x0A", "ÃÂ"):
        spelt = [tokens[i] for i in tokenizer.encode(text).ids]
        assert b"".join(token for token in spelt if token is not None) == text.encode()


def test_the_embedded_base_spells_any_bytes() -> None:
    tokenizer = load_tokenizer("tiny-gpt2")
    vocabulary = Vocabulary.of(tokenizer)
    assert len(vocabulary.tokens) == len(tokenizer)
    assert set(vocabulary.tokens) >= {bytes([byte]) for byte in range(256)}
    assert vocabulary.roles["eos"] == tokenizer.eos_token_id
    assert vocabulary.tokens[vocabulary.roles["eos"]] is None
    chance = random.Random(0)
    text = "".join(chr(chance.choice([32, 65, 0x0A, 0xE9, 0x6771, 0x1F989])) for _ in range(300))
    spelt = [vocabulary.tokens[i] for i in tokenizer.encode(text)]
    assert b"".join(token for token in spelt if token is not None) == text.encode()


def test_special_tokens_have_no_bytes_and_added_words_their_own() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.add_tokens([AddedToken(" Ġé", special=False)])
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.roles == {"eos": 0}
    assert vocabulary.tokens[0] is vocabulary.tokens[-2] is None
    assert vocabulary.tokens[-1] == " Ġé".encode()
    assert None not in vocabulary.tokens[1:-2]


def test_byte_tokens_count_only_for_bytes_without_a_token_of_their_own() -> None:
    tokens = Vocabulary.of(llama()).tokens
    ids = llama().get_vocab()
    assert tokens[ids["<0x0A>"]] == b"\n"
    assert tokens[ids["<0xEF>"]] == b"\xef"  # "ï" is another token: two bytes in UTF-8
    assert tokens[ids["A"]] == b"A"
    assert tokens[ids["▁the"]] == b" the"
    assert [byte for byte in range(256) if tokens[3 + byte] is None] == sorted(b" theA")


def test_metaspace_decoders_without_byte_tokens() -> None:
    scores = [("<unk>", 0.0), ("▁a", -1.0), ("<0x0A>", -2.0)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    assert Vocabulary.of(tokenizer).tokens == (b"<unk>", b" a", b"<0x0A>")


def test_word_pieces() -> None:
    pieces = {"[UNK]": 0, "[PAD]": 1, "walk": 2, "##ing": 3, "é": 4, "##": 5}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]"])
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.tokens == (None, None, b" walk", b"ing", " é".encode(), b"")
    assert vocabulary.roles == {"unk": 0, "pad": 1}


def test_without_a_decoder_tokens_are_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "Ġb": 1, "▁": 4}, unk_token="a"))
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.tokens == (None, "Ġb".encode(), None, None, "▁".encode())
    assert vocabulary.roles == {"unk": 0}


def test_the_roles_are_those_that_a_transformers_tokenizer_gives() -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama(), **special)
    vocabulary = Vocabulary.of(tokenizer)
    assert vocabulary.roles == {"bos": 1, "eos": 2, "pad": 2}
    assert vocabulary.tokens[:3] == (None, None, None)
    raw = Vocabulary.of(llama())
    assert raw.tokens == vocabulary.tokens
    assert raw.roles == {"bos": 1, "eos": 2, "unk": 0}


def test_other_things_are_refused() -> None:
    with pytest.raises(CoterieError, match=r"fast tokenizers only.*tokenizer\.json"):
        Vocabulary.of(object())  # pyright: ignore[reportArgumentType]


def test_digests_tell_vocabularies_apart(vocabulary) -> None:
    tokens = [(), (b"",), (None,), (b"a", b"b"), (b"b", b"a"), (b"ab",), (b"a", b"b", None)]
    some = [vocabulary(*each) for each in (*tokens, (b"none;",), (None, None))]
    some += [vocabulary(None, None, eos=0), vocabulary(None, None, eos=1)]
    assert len({v.digest for v in some}) == len(some)
    assert vocabulary(b"a", None, eos=1).digest == vocabulary(b"a", None, eos=1).digest
    both = vocabulary(None, None, bos=0, eos=1), vocabulary(None, None, eos=1, bos=0)
    assert both[0].digest == both[1].digest

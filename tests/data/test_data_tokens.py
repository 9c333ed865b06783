"""Texts as tokens, and windows of them."""

import json
import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from public_text import public_text
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.bases import load_tokenizer
from coterie.data.kinds.text import CHUNK, Tokens, evaluation_windows, even_windows
from coterie.data.spec import DataSpec, Limits
from coterie.data.texts import Texts
from coterie.data.tokens import ClientData, pooled, tokenise
from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.losses.tokens import Batch
from coterie.seeding import generator

MIXED = "def f():\n    x = 'naïve Ölpreis'\n\n\n        你好，世界 👩‍👩‍👧 مرحبا  \r\n здравствуйте"
LETTERS = st.sampled_from("a e\n.é你👩\u200d🏽") | st.characters(codec="utf-8")
PLAIN = "A plain text of some words, long enough for a window."


def train_tokens(documents: list[str], tokenizer: Any, limit: int | None = None) -> Tokens:
    data = DataSpec(window=1, limits=Limits(train=limit))
    tokens = tokenise(Texts(documents, [PLAIN], [PLAIN]), tokenizer, data, "anna").train
    assert isinstance(tokens, Tokens)
    return tokens


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5])
def test_a_part_of_the_validation_samples_is_trained_on(tokenizer, fraction) -> None:
    window, texts = 3, Texts([PLAIN], [PLAIN * 3], [PLAIN])
    data = DataSpec(window=window, validation_for_training=fraction)
    plain = tokenise(texts, tokenizer, DataSpec(window=window), "anna")
    moved = tokenise(texts, tokenizer, data, "anna")
    *samples, rest = plain.validation.ids.split(window + 1)
    assert len(samples) > 8 > len(rest)
    is_given = [i * fraction % 1 + fraction >= 1 for i in range(len(samples))]
    given = [sample for sample, chosen in zip(samples, is_given, strict=True) if chosen]
    kept = [sample for sample, chosen in zip(samples, is_given, strict=True) if not chosen]
    assert len(given) == pytest.approx(len(samples) * fraction, abs=1)
    assert torch.equal(moved.train.ids, torch.cat([plain.train.ids, *given, *[rest] * bool(given)]))
    assert torch.equal(moved.validation.ids, torch.cat([*kept, rest]))
    assert torch.equal(moved.test.ids, plain.test.ids)


def test_a_single_validation_sample_is_not_trained_on(tokenizer) -> None:
    texts, data = Texts([PLAIN], [PLAIN], [PLAIN]), DataSpec(window=9, validation_for_training=0.5)
    trained = tokenise(texts, tokenizer, data, "anna").train
    assert torch.equal(trained.ids, train_tokens([PLAIN], tokenizer).ids)


def spelled_bytes(tokens: Tokens, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the letters of byte-level tokens, which have one letter per byte."""
    spelled = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
    return sum(len(token) for token in spelled if token != tokenizer.eos_token)


def test_documents_are_joined_by_end_of_text(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = train_tokens([PLAIN, MIXED, PLAIN], tokenizer)
    plain, mixed = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (PLAIN, MIXED))
    end = [tokenizer.eos_token_id]
    assert tokens.ids.tolist() == plain + end + mixed + end + plain
    assert tokens.bytes == len((PLAIN + MIXED + PLAIN).encode())
    assert not tokens.ids.is_floating_point()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.text(alphabet=LETTERS), max_size=3), st.integers(12, 80))
def test_bytes_are_exact_under_any_limit(tokenizer, more, limit) -> None:
    documents = [PLAIN, *more, MIXED]
    everything = train_tokens(documents, tokenizer)
    tokens = train_tokens(documents, tokenizer, limit)
    assert len(tokens.ids) <= limit
    assert torch.equal(tokens.ids, everything.ids[: len(tokens.ids)])
    assert tokens.bytes == spelled_bytes(tokens, tokenizer)
    assert everything.bytes == sum(len(text.encode()) for text in documents)


@pytest.mark.slow
def test_a_limit_is_met_but_for_a_broken_character(tokenizer: PreTrainedTokenizerBase) -> None:
    everything = train_tokens([PLAIN, MIXED], tokenizer)
    for limit in range(12, len(everything.ids) + 3):
        tokens = train_tokens([PLAIN, MIXED], tokenizer, limit)
        missing = min(limit, len(everything.ids)) - len(tokens.ids)
        assert 0 <= missing <= 3
        assert "\ufffd" not in str(tokenizer.decode(tokens.ids.tolist()))
        if missing:
            longer = everything.ids[: len(tokens.ids) + 1].tolist()
            assert str(tokenizer.decode(longer)).endswith("\ufffd")


def test_bytes_are_exact_where_a_tokenizer_trims_spaces_from_offsets() -> None:
    # GPT-2's tokenizer excludes the space of the token "newline, space" from its offsets.
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĠ", "<end>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    encoder = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ġ")]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.post_processor = processors.ByteLevel(trim_offsets=True)
    trimming = PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="<end>")
    for limit in range(2, 30):
        tokens = train_tokens(["def f():\n    return 1\n  \n   # 你好"], trimming, limit)
        assert tokens.bytes == spelled_bytes(tokens, trimming)


def test_bytes_are_exact_with_byte_fallback_and_a_prepended_space() -> None:
    # Llama's tokenizer adds a space before the text, and has tokens for single bytes.
    names = [f"<0x{byte:02X}>" for byte in range(256)] + [*"▁abcdefghijklmnopqrstuvwxyz", "</s>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    encoder = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    encoder.normalizer = normalizers.Sequence(steps)
    llama = PreTrainedTokenizerFast(tokenizer_object=encoder, eos_token="</s>")
    text = "some words 你好 👩 more"
    for limit in range(4, 60):
        tokens = train_tokens([text], llama, limit)
        kept = len(tokens.ids) - 1  # without the space before the text, which no byte stands for
        assert tokens.bytes == min(kept, len(text.encode()))
        assert kept >= min(limit - 1, len(text.encode())) - 3


def test_long_documents_are_encoded_in_chunks_and_only_to_the_limit(tokenizer, caplog) -> None:
    line = "A line of text with a number of words 你好.\n"
    text = line * (3 * CHUNK // len(line))
    once = tokenizer(line, add_special_tokens=False)["input_ids"]
    with caplog.at_level(logging.WARNING):
        tokens = train_tokens([text], tokenizer)
    assert not caplog.records
    assert tokens.ids.tolist() == once * (len(text) // len(line))
    assert tokens.bytes == len(text.encode())

    kept = train_tokens([text] * 1000, tokenizer, 500)  # all of it would take minutes
    assert torch.equal(kept.ids, tokens.ids[: len(kept.ids)])
    assert len(kept.ids) >= 497


def test_a_tokenizer_that_truncates_and_pads_does_neither_here() -> None:
    tokenizer: Any = load_tokenizer("tiny-gpt2")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=100)
    before = tokenizer.backend_tokenizer.to_str()
    assert train_tokens([PLAIN], tokenizer).bytes == len(PLAIN)
    assert tokenizer.backend_tokenizer.to_str() == before


NO_END = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
LONG = PLAIN * 20


NOT_ENCODABLE = [
    ([[LONG], ["Short."], []], None, "validation text of client anna has 3 tokens, .* 129"),
    ([[LONG], [LONG], []], None, "The test text of client .* has 0 tokens"),
    ([[PLAIN]] * 3, NO_END, "has no end-of-text token"),
    ([[PLAIN]] * 3, PreTrainedTokenizerBase(), r"has no tokenizer\.json"),
]


@pytest.mark.parametrize(("texts", "words", "sentence"), NOT_ENCODABLE)
def test_texts_that_cannot_be_encoded_are_refused(texts, words, sentence, tokenizer) -> None:
    with pytest.raises(CoterieError, match=sentence):
        tokenise(Texts(*texts), words if words is not None else tokenizer, DataSpec(), "anna")


def test_the_public_text_is_read_whole_and_encoded_as_any_text(tokenizer, tmp_path) -> None:
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "a.txt").write_bytes(MIXED.encode())
    (tmp_path / "public" / "b.jsonl").write_text(json.dumps({"body": PLAIN}))
    data = DataSpec(window=8, text="body", public="public")
    tokens = public_text(data, tmp_path, tokenizer)
    as_usual = train_tokens([MIXED, PLAIN], tokenizer)
    assert isinstance(tokens, Tokens)
    assert torch.equal(tokens.ids, as_usual.ids)
    assert tokens.bytes == as_usual.bytes == len((MIXED + PLAIN).encode())
    limited = data.model_copy(update={"limits": Limits(public=12)})
    assert torch.equal(public_text(limited, tmp_path, tokenizer).ids, tokens.ids[:12])


def test_a_public_text_that_cannot_be_used_is_said(tokenizer, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("Short.")
    for source, sentence in (
        ("gone", "^The public text: there is no file or folder .*gone"),
        ("a.txt", r"^The public text has 3 tokens, .* at least 129; .* raise data\.limits\.public"),
    ):
        with pytest.raises(CoterieError, match=sentence):
            public_text(DataSpec(public=source), tmp_path, tokenizer)


def test_pooling_concatenates_each_split() -> None:
    def tokens(*ids: int) -> Tokens:
        return Tokens(torch.tensor(ids, dtype=torch.int32), 2 * len(ids))

    first = ClientData(tokens(1, 2), tokens(3), tokens(4))
    both = pooled([first, ClientData(tokens(5), tokens(6, 7), tokens(8))])
    assert both.train.ids.tolist() == [1, 2, 5]
    assert both.validation.ids.tolist() == [3, 6, 7]
    assert both.test.ids.tolist() == [4, 8]
    assert [split.bytes for split in vars(both).values()] == [6, 6, 4]


CONTEXT = 99_999


def stream(count: int) -> Tokens:
    return Tokens(torch.arange(count, dtype=torch.int32), bytes=count)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 5))
def test_every_token_is_predicted_once_after_the_token_before_it(count, window, batch) -> None:
    seen: list[tuple[int, int]] = []
    for ids, mask in evaluation_windows(stream(count), window, CONTEXT, batch):
        assert ids.dtype == torch.int64
        assert ids.shape == (len(mask), window + 1)
        assert 1 <= len(mask) <= batch
        assert mask.shape == (len(ids), window)
        for row, keep in zip(ids.tolist(), mask.tolist(), strict=True):
            pairs = zip(row, row[1:], keep, strict=False)
            seen += [(given, wanted) for given, wanted, kept in pairs if kept]
    assert seen == [(i - 1 if i else CONTEXT, i) for i in range(count)]


def test_batches_are_windows_of_the_stream_at_every_offset_alike() -> None:
    sample = sample_batch(stream(12), 8000, 9, generator(0, "batch"))
    assert isinstance(sample, Batch)
    batch, counted, real = sample
    assert counted is None
    assert real is None
    assert batch.shape == (8000, 10)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, batch[:, :1] + torch.arange(10))
    starts = torch.bincount(batch[:, 0], minlength=3)
    assert len(starts) == 3
    assert (starts / 8000 - 1 / 3).abs().max() < 0.03


def test_batches_follow_their_generator() -> None:
    first, again, other = (
        sample_batch(stream(1000), 16, 8, generator(seed, "batch")).ids for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # A split of one window suffices.
    batch = sample_batch(stream(9), 4, 8, generator(0, "batch")).ids
    assert torch.equal(batch, torch.arange(9).expand(4, 9))


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 70))
def test_an_even_windows_is_windows_of_the_whole_evenly_spaced(count, window, most) -> None:
    [(ids, mask)] = evaluation_windows(stream(count), window, CONTEXT, 60)
    rows = len(ids)
    chosen = [n * rows // min(most, rows) for n in range(min(most, rows))]
    assert chosen[0] == 0
    assert len({*chosen}) == len(chosen)
    steps = {after - before for before, after in pairwise([*chosen, rows])}
    assert max(steps) - min(steps) <= 1
    batch = even_windows(stream(count), most, window, CONTEXT)
    assert torch.equal(batch.ids, ids[chosen])
    assert batch.counted is not None
    assert torch.equal(batch.counted, mask[chosen])
    assert batch.real is None

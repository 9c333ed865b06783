"""Prompts with answers as tokens: what the loss counts, what is too long, what is pooled."""

from typing import Any

import pytest
import torch
from public_text import public_text
from questions import SHORT, data_of, rows, write
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from coterie.bases import load_tokenizer
from coterie.data.examples import Examples
from coterie.data.items import Instruction
from coterie.data.parts import bare_encoder
from coterie.data.spec import DataSpec, Limits
from coterie.data.texts import Texts
from coterie.data.tokens import tokenise
from coterie.data.windows import sample_batch
from coterie.errors import CoterieError
from coterie.seeding import generator

SAMPLES = [
    Instruction("Name a colour", "blue"),
    Instruction("A colour: ", "red and\ngreen"),
    Instruction("Farbe:\n", "grün, 你好 👩‍👩‍👧"),
    Instruction("def f(x):\n    ", "return x"),
    Instruction("你好？", "مرحبا"),
]


def encoded(tokenizer: PreTrainedTokenizerBase, given: list[Instruction], **data: Any) -> Examples:
    spec = DataSpec(instructions=SHORT, **data)
    other = [Instruction("a", "b")]
    return data_of(tokenise(Texts(given, other, other), tokenizer, spec, "anna").train)


def test_the_loss_counts_the_answer_and_the_end_alone(tokenizer) -> None:
    split = encoded(tokenizer, SAMPLES)
    batch: Any = split.batch(range(len(SAMPLES)))
    ids, counted, real = batch
    end = tokenizer.eos_token
    for row, learnt, inside, sample in zip(ids, counted, real, SAMPLES, strict=True):
        prompt = sample.prompt.rstrip(" ")
        space = "" if prompt.endswith("\n") else " "
        assert str(tokenizer.decode(row[1:][learnt].tolist())) == f"{space}{sample.answer}{end}"
        # in front of the answer: the first token, and the prompt as it is without its answer
        before = row[: int(learnt.nonzero()[0]) + 1].tolist()
        alone = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert before == [tokenizer.eos_token_id, *alone]
        assert inside.sum() == len(before) + learnt.sum() - 1
        assert not learnt[inside.sum() :].any()
    assert split.bytes == sum(len(sample.answer.encode()) for sample in SAMPLES)
    assert split.lengths.sum() == counted.sum()


def test_a_tokenizer_s_own_first_token_comes_first() -> None:
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<start>", "<end>"]
    encoder = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = {"bos_token": "<start>", "eos_token": "<end>"}
    words = PreTrainedTokenizerFast(tokenizer_object=encoder, **ends)
    split = encoded(words, [Instruction("ab", "c"), Instruction("d\n", "e")])
    read = words.convert_ids_to_tokens(split.ids.tolist())
    assert read == ["<start>", *"abĠc", "<end>", "<start>", *"dĊe", "<end>"]
    assert split.starts.tolist() == [0, 6, 11]
    assert split.answers.tolist() == [3, 9]


def test_what_is_too_long_is_dropped_and_counted_and_limits_count_samples(tokenizer) -> None:
    def length(sample: Instruction) -> int:
        parts = (sample.prompt, f" {sample.answer}")
        return sum(len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)

    given = [Instruction("word " * n + "?", "yes") for n in (1, 60, 3, 4, 5, 70)]
    window = length(given[3]) + 1  # with its end token
    split = encoded(tokenizer, given, window=window)
    assert split.items == (given[0], given[2], given[3])
    assert split.too_long == 3
    assert split.batch(range(3)).ids.shape == (3, window + 1)
    limited = encoded(tokenizer, given, window=window, limits=Limits(train=1))
    assert limited.items == (given[0],)
    for samples, reason in ((given[1:2], "sample of at most"), ([], "samples; add")):
        with pytest.raises(CoterieError, match=f"^The train text of client anna has no {reason}"):
            encoded(tokenizer, samples, window=10)


def test_a_batch_is_rows_of_the_samples(tokenizer: PreTrainedTokenizerBase) -> None:
    split = encoded(tokenizer, SAMPLES)
    first, again, other = (
        sample_batch(split, 40, 128, generator(seed, "batch")) for seed in (0, 0, 1)
    )
    assert torch.equal(first.ids, again.ids)
    assert not torch.equal(first.ids, other.ids)
    rows = {tuple(row) for row in split.batch(range(len(split))).ids.tolist()}
    assert {tuple(row) for row in first.ids.tolist()} == rows


def test_the_public_text_may_be_instructions(tokenizer, tmp_path) -> None:
    write(tmp_path / "public.jsonl", *rows(10))
    data = DataSpec(instructions=SHORT, public="public.jsonl", limits=Limits(public=4))
    public = data_of(public_text(data, tmp_path, tokenizer))
    assert [item.prompt for item in public.instructions] == [f"case {i}:" for i in range(4)]
    assert {item.choices for item in public.items} == {("no", "yes")}


def test_a_tokenizer_is_copied_once() -> None:
    tokenizers = [load_tokenizer("tiny-gpt2") for _ in range(2)]
    first, again = [[bare_encoder(each)[0] for each in tokenizers] for _ in range(2)]
    assert [id(encoder) for encoder in first] == [id(encoder) for encoder in again]
    assert first[0] is not first[1]
    assert first[0] is not tokenizers[0].backend_tokenizer

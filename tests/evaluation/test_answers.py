"""Losses and choices of answers, one unpadded row at a time; Rouge-L by hand."""

import math
import random
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import Tensor
from torch.nn import functional as F

from coterie.adapters import Adapter, Layout
from coterie.bases import Base, load_base
from coterie.bases.precision import Precision
from coterie.data.examples import Encoding, Examples, with_choices
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import examples
from coterie.data.measured import Choices, Measured
from coterie.errors import CoterieError
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.evaluate import evaluate
from coterie.evaluation.metrics import metric_named

ANIMALS = ("cat", "a very old elephant", "dog", "a")
ITEMS = [
    Instruction("Who purrs?\n", "cat", ANIMALS),
    Instruction("Of all the animals that you have ever heard of, who trumpets? ", ANIMALS[1]),
    Instruction("Who barks?", "dog", ANIMALS),
    Instruction("Which letter?", "a", ("a", "b", "b")),
    Instruction("Of all the animals, who trumpets?", ANIMALS[1], ANIMALS),
    Instruction("Warm?", "yes", ("no", "yes")),
    Instruction("Cold?", "yes", ("no", "yes", "maybe it is, and maybe not")),
    Instruction("Wet?", "no", ("no", "yes")),
    Instruction("Ünïcödé?", "naïve", ("naïve", "café")),
]


def adapted(folder: str, precision: Precision = "fp32", seed: int = 1, std: float = 0.3) -> Base:
    base = load_base(folder, precision, 64)
    adapter = Adapter(base.model, Layout(), seed=0, client="ada", common=lambda _: False)
    chance = torch.Generator().manual_seed(seed)
    for parameter in adapter.tensors().values():
        parameter.data.normal_(std=std, generator=chance)
    adapter.attach(base.model)
    return base


def encoded(base: Base, items: list[Instruction], window: int = 40) -> Examples:
    words: Any = base.tokenizer
    encoder, end = words.backend_tokenizer, words.eos_token_id
    ends = base.context_token, end
    return examples(items, Encoding(encoder, ends, window, None, "Client ada: its text"))


def parts(base: Base, item: Instruction, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and those of its answer; a space separates words."""
    newline = item.prompt.endswith("\n")
    prompt = item.prompt if newline else item.prompt.rstrip()
    words: Any = base.tokenizer
    before = words(prompt, add_special_tokens=False)["input_ids"]
    after = words(answer if newline else f" {answer}", add_special_tokens=False)["input_ids"]
    return [base.context_token, *before], [*after, words.eos_token_id]


@torch.no_grad()
def alone(base: Base, item: Instruction, answer: str, window: int) -> Tensor:
    """Return the losses of one answer's tokens, computed in a batch of one."""
    before, after = parts(base, item, answer)
    ids = torch.tensor([[*before, *after][: window + 1]])
    logits = base.model(ids[:, :-1]).logits[0].double()
    return F.cross_entropy(logits, ids[0, 1:], reduction="none")[len(before) - 1 :]


def right(base: Base, item: Instruction, window: int) -> bool:
    means = {c: alone(base, item, c, window).mean().item() for c in item.choices}
    return min(means, key=means.__getitem__) == item.answer


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_scores_are_those_of_rows_alone(bases, family, batch) -> None:
    base = adapted(str(bases / family))
    score = evaluate(base, base.model, encoded(base, ITEMS), 40, batch)
    losses = [alone(base, item, item.answer, 40) for item in ITEMS]
    assert score.tokens == sum(map(len, losses))
    assert score.bytes == sum(len(item.answer.encode()) for item in ITEMS)
    assert score.nats == pytest.approx(torch.cat(losses).sum().item(), rel=1e-5)
    won = [right(base, item, 40) for item in ITEMS if item.choices]
    assert 0 < sum(won) < len(won)
    figures = score.as_dict()
    assert (figures["accuracy"], figures["samples"]) == (sum(won) / len(won), len(ITEMS))
    mean = score.nats / score.tokens
    assert (figures["loss"], figures["perplexity"]) == (mean, pytest.approx(math.exp(mean)))
    assert figures["bits_per_byte"] == pytest.approx(score.nats / math.log(2) / score.bytes)
    assert {"exact_match", "rouge_l"}.isdisjoint(figures)
    items = score.items()
    assert items["nats"] == pytest.approx([loss.sum().item() for loss in losses], rel=1e-4)
    assert items["tokens"] == [len(loss) for loss in losses]
    wins = [float(right(base, item, 40)) if item.choices else None for item in ITEMS]
    assert items["accuracy"] == wins


@pytest.mark.parametrize(
    ("losses", "right"),
    [
        ([2.0, 2.0], 1 / 2),
        ([2.0, 2.0, 2.0], 1 / 3),
        ([2.0, 2.0, 3.0], 1 / 2),
        ([2.0, 2.0 * (1 - 1e-7), 3.0], 1 / 2),
        ([2.0, 1.0, 1.0], 0),
        ([2.0, 2.0 + 1e-4, 2.0 + 1e-4], 1),
        ([2.0, 2.0 - 1e-4], 0),
        ([0.0, 0.0], 1 / 2),
        ([-1e-7, 1.0], 1),
        ([math.nan, math.nan], 0),
        ([1.0, math.inf], 1),
        ([math.inf, math.inf], 0),
    ],
)
def test_a_tie_counts_as_a_draw_among_the_likeliest(bases, losses, right) -> None:
    base = load_base(str(bases / "gpt2"), "fp32", 64)
    choices = ("yes", "no", "maybe it is, and maybe not")[: len(losses)]
    items = [Instruction("Wet?", "yes", choices), Instruction("Free?", "anything")]
    rows, owners = with_choices(base, encoded(base, items), 40)
    means = torch.tensor([losses[0], 1.0, *losses[1:]], dtype=torch.float64)
    nats, owners = means * rows.lengths, torch.tensor([0, 1, *owners])
    choices = Choices(nats, rows.lengths, owners, [True, False])
    measured = Measured(nats[:2], rows.lengths[:2], choices=choices)
    assert ACCURACY.score(measured) == [pytest.approx(right), None]


def test_a_choice_that_is_too_long_is_scored_on_what_fits(bases) -> None:
    base = adapted(str(bases / "gpt2"))
    long = "elephant " * 90  # more than the base's context of 64
    items = [Instruction(f"{n} or {n}?", "no", ("no", long)) for n in range(8)]
    window = len(parts(base, items[0], "no")[0]) + 2
    score = evaluate(base, base.model, encoded(base, items, window), window)
    won = [right(base, item, window) for item in items]
    assert score.as_dict()["accuracy"] == sum(won) / len(won)


def test_without_choices_there_is_no_accuracy(bases) -> None:
    base = adapted(str(bases / "gpt2"))
    figures = evaluate(base, base.model, encoded(base, ITEMS[1:2]), 40).as_dict()
    assert set(figures) == {"perplexity", "bits_per_byte", "loss", "tokens", "bytes", "samples"}


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_what_is_written_is_compared(bases, batch) -> None:
    base = adapted(str(bases / "gpt2"))
    words: Any = base.tokenizer
    ids = [torch.tensor([parts(base, item, "")[0]]) for item in ITEMS]
    with torch.no_grad():
        texts = [words.decode(base.model(i).logits[0, -1].argmax()) for i in ids]
    # The first three samples' answers become what the model writes as its one token.
    items = [Instruction(i.prompt, t.strip()) for i, t in zip(ITEMS[:3], texts, strict=False)]
    assert all(item.answer for item in items)
    score = evaluate(base, base.model, encoded(base, [*items, *ITEMS[3:]]), 40, batch, generate=1)
    figures = score.as_dict()
    assert figures["exact_match"] == 3 / len(ITEMS)
    assert score.items()["exact_match"] == [1, 1, 1] + [0] * (len(ITEMS) - 3)
    answers = [item.answer for item in [*items, *ITEMS[3:]]]
    assert score.items()["rouge_l"] == pytest.approx(list(map(f1, answers, texts)))
    assert figures["rouge_l"] == pytest.approx(sum(map(f1, answers, texts)) / len(ITEMS))


def scored(name: str, answers: Sequence[str], texts: Sequence[str]) -> Sequence[float | None]:
    """Return a metric's scores of generated answers."""
    none = torch.zeros(len(texts))
    return metric_named(name).score(Measured(none, none, answers, texts))


def f1(answer: str, text: str) -> float:
    """Return Rouge-L of texts in plain letters, by the recursive definition."""
    a, b = answer.lower().split(), text.lower().split()

    def common(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return max(common(i + 1, j), common(i, j + 1), (a[i] == b[j]) + common(i + 1, j + 1))

    return 2 * common(0, 0) / (len(a) + len(b)) if common(0, 0) else 0.0


def test_answers_of_one_token_are_finite_in_bf16(bases) -> None:
    base = adapted(str(bases / "llama"), "bf16")
    items = [Instruction(f"Is it {n}?", "the", ("the", "a")) for n in range(5)]
    figures = evaluate(base, base.model, encoded(base, items), 40, 2, generate=2).as_dict()
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["tokens"] == 2 * len(items)


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("the cat sat", "the cat sat", 1),
        ("the cat sat on the mat", "the dog sat on a mat", 2 * 4 / 12),  # the, sat, on, mat
        ("The cat, sat!", "the CAT sat", 1),
        ("one two three", "three two one", 2 * 1 / 6),
        ("cats", "cat", 0),  # no stemming
        ("yes", "", 0),
        ("a b c d", "b d", 2 * 2 / 6),
    ],
)
def test_rouge_l_by_hand(answer, text, score) -> None:
    assert scored("rouge_l", [answer, answer], [text, answer]) == pytest.approx([score, 1])


EXACT = (
    *("🙂", "👍🏽 👩‍👩‍👧 🇩🇪 1️⃣", "Привет, мир!", "東京は日本の首都です。", "中国", "สวัสดีครับ"),
    *("مرحبا بالعالم", "می\u200cروم", "नमस्ते दुनिया", "안녕하세요", "γειά ΣΑΣ", "café", "→", "?!"),
)


@pytest.mark.parametrize("text", EXACT)
def test_an_answer_given_exactly_scores_one_in_any_script(text) -> None:
    assert scored("rouge_l", [text, text], [f" {text}\n", "another answer"]) == [1, 0]


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("café", "caf", 0),
        ("naïve", "na ve", 0),
        ("café", "cafe\u0301", 1),
        ("１２ ＡＢＣ", "12 abc", 1),
        ("ｶﾞ", "ガ", 1),
        ("❤", "❤\ufe0f", 1),
        ("МОСКВА", "москва", 1),
        ("ΟΔΟΣ", "οδος", 1),
        ("Straße", "STRASSE", 1),
        ("👍🏽", "👍", 0),
        ("東京都", "京都", 2 * 2 / 5),
        ("12月", "12日", 2 * 1 / 4),
        ("красный дом", "белый дом", 2 * 1 / 4),
        ("नमस्ते", "नमसते", 0),
    ],
)
def test_words_of_other_scripts_are_compared_whole(answer, text, score) -> None:
    assert scored("rouge_l", [answer], [text]) == pytest.approx([score])


def test_english_scores_are_those_of_the_reference() -> None:
    draw = random.Random(0)
    words = ["The", "cat", "don't", "don’t", "x_y", "$5", "£5", "U.S.", "3.14", "e-mail", "—"]
    texts = [draw.choice((" ", "\n")).join(draw.choices(words, k=9)) for _ in range(400)]
    texts += ["Coke™ (20°C) …", "Coke, 20 C"]
    reference = RougeScorer(["rougeL"], use_stemmer=False)
    wanted = [reference.score(*pair)["rougeL"].fmeasure for pair in pairwise(texts)]
    assert scored("rouge_l", texts[:-1], texts[1:]) == wanted


def test_composed_accents_and_spaces_around_an_answer_do_not_count() -> None:
    answers, texts = ["café", "café", "yes", "no", "no", "a b"], ["cafe\u0301", "cafe", " yes\n"]
    assert scored("exact_match", answers, [*texts, "no.", "No", "a b"]) == [1, 0, 1, 0, 0, 1]


def test_without_the_library_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(CoterieError, match="pip install rouge-score"):
        scored("rouge_l", ["yes"], ["yes"])

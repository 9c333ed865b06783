"""Positions of two tokenizers against the bytes that they have read, and warping by enumeration."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import byte_level_bpe, edits, sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from coterie.alignment.sequence import WITHIN, dynamic, ends, keyed, matched
from coterie.alignment.vocabulary import byte_level, byte_piece

CORPUS = [
    "The cat sat on the mat, and the other cat sat there, too.",
    "What is the capital of France? It is Paris.",
    "naïve café au lait",
    "שלום עולם, שלום",
    "猫は好き",
]
SENTENCES = [
    *CORPUS,
    "",
    " ",
    " It is Paris.",
    "  the   cat  ",
    "so 😀😀 it is 👩‍👩‍👧 here",
    "😀",
    "e\u0301te\u0301 n\u0303",
    "של\u05b8ום the cat",
    "中文 and the 猫😀は",
    "a\tb\n\nthe",
]
WORDS = st.lists(st.sampled_from([*"aetcé猫ש😀 ", "\u0301", "the ", " cat"]), max_size=12)
TEXTS = st.one_of(st.text(max_size=12), WORDS.map("".join))


def wordpiece() -> Tokenizer:
    """Train a tokenizer like BERT's, which loses spaces, capitals and accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {"bytes": byte_level_bpe(CORPUS, 320), "pieces": sentencepiece(CORPUS, 330)}
TOKENIZERS["words"] = wordpiece()


def read(name: str, text: str) -> list[int]:
    """Return the number of characters read at each position by decoding, or WITHIN.

    The space that SentencePiece puts first counts as a part of the first character.
    """
    encoding = TOKENIZERS[name].encode(text)
    if name == "words":
        return covered(encoding.offsets)
    parts = [
        byte_level(t) if name == "bytes" else byte_piece(t) or t.replace("▁", " ").encode()
        for t in encoding.tokens
    ]
    dummy = int(name == "pieces")
    counts = [0]
    for n in range(1, len(parts) + 1):
        try:
            count = len(b"".join(parts[:n]).decode()) - dummy
        except UnicodeDecodeError:
            count = WITHIN
        counts.append(count or WITHIN)
    return counts


def covered(offsets: list[tuple[int, int]]) -> list[int]:
    """Compute the result of `read` from offsets.

    A position is whole if no later token begins before its end, and the next one adds text.
    """
    counts = []
    for n in range(len(offsets) + 1):
        upto = max((end for _, end in offsets[:n]), default=0)
        whole = all(start >= upto and end > upto for start, end in offsets[n:])
        counts.append(upto if whole else WITHIN)
    return counts


def pairs(student: list[int], teacher: list[int]) -> list[int]:
    """Find for each position the teacher's position with the same end, by trying all."""
    return [next((j for j, t in enumerate(teacher) if s == t != WITHIN), -1) for s in student]


def compare(text: str) -> None:
    ends_of = {name: ends(t.encode(text).offsets) for name, t in TOKENIZERS.items()}
    for name, positions in ends_of.items():
        assert positions == read(name, text), name
        whole = [end for end in positions if end != WITHIN]
        assert whole == sorted(set(whole))
        assert whole[0] == 0
        assert positions[-1] != WITHIN
        # A tokenizer is its own best teacher.
        own = [n if end != WITHIN else -1 for n, end in enumerate(positions)]
        assert matched(torch.tensor(positions), torch.tensor(positions)).tolist() == own
    for student in TOKENIZERS:
        for teacher in TOKENIZERS:
            got = matched(torch.tensor(ends_of[student]), torch.tensor(ends_of[teacher])).tolist()
            assert got == pairs(read(student, text), read(teacher, text)), (student, teacher)


@pytest.mark.parametrize("text", SENTENCES)
def test_positions_match_where_the_same_has_been_read(text) -> None:
    compare(text)


@given(TEXTS)
@settings(max_examples=150)
def test_positions_of_any_text_match_where_the_same_has_been_read(text) -> None:
    compare(text)


OFFSETS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "four bytes of an emoji": ([(0, 1), *[(1, 2)] * 4, (2, 3)], [0, 1, *[WITHIN] * 3, 2, 3]),
    "the last of equal ends": ([(0, 0), (0, 2), (2, 2), (2, 3)], [WITHIN, 0, WITHIN, 2, 3]),
    "nothing": ([], [0]),
    "ends within characters": ([(0, 2), (1, 2), (2, 4), (3, 5)], [0, WITHIN, 2, WITHIN, 5]),
}


@pytest.mark.parametrize(("offsets", "positions"), OFFSETS.values(), ids=OFFSETS)
def test_within_a_character_nothing_matches(offsets, positions) -> None:
    assert ends(offsets) == positions


NUMBERS = st.lists(st.integers(-1, 9), max_size=8)


@given(NUMBERS, st.lists(st.integers(0, 9), max_size=8, unique=True), st.integers(0, 3))
@settings(max_examples=150)
def test_numbers_in_any_order_are_matched(student, teacher, nothing) -> None:
    teacher = [*teacher, *[-1] * nothing]
    numbers = (torch.tensor(each, dtype=torch.int64) for each in (student, teacher))
    assert matched(*numbers).tolist() == pairs(student, teacher)


LISTS = st.lists(st.lists(st.integers(-1, 3), min_size=1, max_size=5), min_size=1, max_size=5)


@given(LISTS, st.data())
@settings(max_examples=150)
def test_keys_keep_texts_apart(texts, data) -> None:
    # Two numbers are equal if and only if texts with one key end at the same character.
    known = st.sampled_from([-1, 0, 1, 5, 2**31 - 1])
    keys = data.draw(st.lists(known, min_size=len(texts), max_size=len(texts)))
    starts = torch.tensor([0, *map(len, texts)]).cumsum(0)
    flat = torch.tensor([end for text in texts for end in text], dtype=torch.int32)
    got = keyed(flat, starts, torch.tensor(keys)).tolist()
    named = [(key, end) for key, text in zip(keys, texts, strict=True) for end in text]
    for a, (key, end) in zip(got, named, strict=True):
        assert (a == -1) == (key < 0 or end < 0)
        for b, other in zip(got, named, strict=True):
            assert (a == b) == (((key, end) == other) if a >= 0 else b < 0)


def warpings(i: int, j: int) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Yield all monotone ways from the pair (i, j) back to (1, 1): the steps and the pairs."""
    if i == j == 1:
        yield (), [(1, 1)]
    for number, (a, b) in enumerate([(i - 1, j - 1), (i - 1, j), (i, j - 1)]):
        if a and b:
            for steps, rest in warpings(a, b):
                yield (number, *steps), [(i, j), *rest]


def enumerated(student: list[str], teacher: list[str]) -> list[int]:
    """Return the cheapest warping of all.

    Of equally cheap ones, it is the one that takes the diagonal first, then steps of the student.
    """
    cost = {}
    for steps, cells in warpings(len(student), len(teacher)):
        cost[sum(edits(student[i - 1], teacher[j - 1]) for i, j in cells), steps] = cells
    _, cells = min(cost.items())
    partners = [[j for i, j in cells if i == n] for n in range(1, len(student) + 1)]
    return [0, *(places[0] if len(places) == 1 else -1 for places in partners)]


PIECES = st.lists(st.sampled_from(["a", "b", "ab", "abc", "", "é"]), min_size=1, max_size=5)


@given(PIECES, PIECES)
@settings(max_examples=150)
def test_the_warping_is_the_cheapest_of_all(student, teacher) -> None:
    assert dynamic(student, teacher) == enumerated(student, teacher)


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        # A word that the teacher spells with two tokens is told by neither of them.
        ([" dog", " utilize"], [" dog", " util", "ize"], [0, 1, -1]),
        ([" dog", " util", "ize"], [" dog", " utilize"], [0, 1, 2, 2]),
        *(([], [], [0]), (["a", "b"], [], [0, -1, -1]), ([], ["a", "b"], [0])),
    ],
)
def test_warping_by_hand(student, teacher, expected) -> None:
    assert dynamic(student, teacher) == expected

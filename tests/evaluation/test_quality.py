"""Duplicates are those that a comparison of every text with every other finds."""

import random
from pathlib import Path

import pytest
from naive_near import changed, naive_pairs

from coterie.data.items import Instruction
from coterie.data.kinds.text import pieces
from coterie.data.spec import PIECE, DataSpec, InstructionSpec
from coterie.data.texts import Texts
from coterie.data.tokens import ClientData, tokenise
from coterie.errors import CoterieError
from coterie.evaluation import quality
from coterie.evaluation.quality import Copy, Kind, Place, Quality, find_copies, without_held_out
from coterie.evaluation.survey import Survey

WRITERS = Path(__file__).parents[2] / "src" / "coterie" / "assets" / "demo-writers"
Splits = dict[tuple[str, str], list[str]]


def naive_near(texts: set[str]) -> set[tuple[str, str]]:
    pairs = [(a, b) for a in texts for b in texts if a.strip() != b.strip()]
    return {(a, b) for a, b in pairs if naive_pairs([[a], [b]])}


def naive_copies(splits: Splits) -> list[Copy]:
    near, copies = naive_near({text for texts in splits.values() for text in texts}), []
    for place, text in places(splits):
        by_kind: dict[Kind, Copy] = {}
        for exact in (True, False):
            for other, candidate in places(splits):
                same = text.strip() == candidate.strip() if exact else (text, candidate) in near
                if same and (kind := kind_of(place, other)):
                    by_kind.setdefault(kind, Copy(kind, exact, place, other, text))
        kinds: tuple[Kind, ...] = ("repeats", "in_training", "in_others")
        copies += [by_kind[kind] for kind in kinds if kind in by_kind]
    return copies


def places(splits: Splits) -> list[tuple[Place, str]]:
    return [(Place(*s, n), t) for s, texts in splits.items() for n, t in enumerate(texts, start=1)]


def kind_of(place: Place, other: Place) -> Kind | None:
    if (place.client, place.split) == (other.client, other.split):
        return "repeats" if other.number < place.number else None
    if other.split != "train":
        return None
    return "in_training" if other.client == place.client else "in_others"


def test_copies_are_found_where_they_are(passages: list[str]) -> None:
    draw = random.Random(1)
    few = [text for own in passages[:5] for text in (own, changed(own, 2, draw), own + "\n")]
    names = [(client, split) for client in ("ann", "ben") for split in ("train", "test")]
    splits = {name: draw.choices(few, k=6) for name in names}
    actual, expected = find_copies(splits), naive_copies(splits)
    assert {c.kind for c in expected} == {"repeats", "in_training", "in_others"}
    assert {c.exact for c in expected} == {True, False}
    # Of several near copies, any may be named.
    facts = [[(c.kind, c.exact, c.place, c.text) for c in copies] for copies in (actual, expected)]
    assert facts[0] == facts[1]
    assert all(kind_of(c.place, c.original) == c.kind for c in actual)
    assert find_copies(splits) == actual


def test_near_copies_are_looked_for_in_the_start_alone(passages: list[str]) -> None:
    near = passages[0].upper()
    splits = {("ann", "train"): [passages[1], passages[0]], ("ann", "test"): [near, passages[1]]}
    assert {c.exact for c in find_copies(splits)} == {True, False}
    assert [c.exact for c in find_copies(splits, compared=10)] == [True]


def found_in(own: Texts, tokens: ClientData, most: int, empty: int = 0) -> Quality:
    return quality.quality({"ann": own}, {"ann": tokens}, most, Survey(empty, {}, {}), [])


def test_what_is_compared_is_what_the_run_reads(tokenizer) -> None:
    book = (WRITERS / "poet.txt").read_text(encoding="utf-8")[:40_000]
    data = DataSpec.model_validate({"window": 16, "limits": {"train": 3000}})
    own = Texts([book, "never read"], [book[:5000]], ["   ", book[20_000:25_000]])
    tokens = tokenise(own, tokenizer, data, "ann")
    read = [str(piece) for piece in tokens.train.compared(own.train)]
    kept = tokenizer.decode(tokens.train.ids.tolist())
    assert kept.startswith("".join(read))
    assert 0 <= len(kept) - len("".join(read)) < 2 * PIECE
    assert "".join(map(str, tokens.test.compared(own.test))) == book[20_000:25_000]

    result = found_in(own, tokens, 10**6, empty=2)
    train, validation, test = result.splits
    assert (train.tokens, train.texts, train.short) == (3000, len(read), 0)
    assert validation.exact["in_training"] == validation.texts - 1 > 0  # the last ends elsewhere
    assert sum(test.exact.values()) == 0
    assert result.compared is None
    assert found_in(own, tokens, 300).compared == 100
    first, last = quality.sentences(result)
    copies = "validation or test texts duplicated in the same client's training text: "
    assert first.startswith(f"Data: {copies}")
    assert last == "Data: empty records, excluded: 2; run `coterie data FILE` for details"


def test_of_instructions_the_samples_that_fit_are_compared(tokenizer) -> None:
    twice = Instruction("Is it?", "yes")
    own = Texts([twice, Instruction("word " * 100, "no"), twice], [twice], [twice])
    tokens = tokenise(own, tokenizer, DataSpec(window=20, instructions=InstructionSpec()), "ann")
    assert tokens.train.compared(own.train) == (twice, twice)
    train, validation, _ = found_in(own, tokens, 99).splits
    assert (train.short, train.exact["repeats"], validation.exact["in_training"]) == (2, 1, 1)


def naively_without(own: Texts[str], near: set[tuple[str, str]]) -> str:
    """Return the training text that remains, piece by piece."""
    held_out = [part for text in own.validation + own.test for part in pieces(text, PIECE)]
    again = {part.strip() for part in held_out}
    parts = [part for text in own.train for part in pieces(text, PIECE)]
    kept = [p for p in parts if not any((p, other) in near for other in held_out)]
    return "".join(part for part in kept if part.strip() not in again)


def test_what_is_held_out_leaves_training() -> None:
    draw = random.Random(2)
    files = [WRITERS / f"{writer}.txt" for writer in ("poet", "whaler")]
    books = [file.read_text(encoding="utf-8")[:30_000] for file in files]
    some = list(pieces(books[0], PIECE))
    own = Texts(
        train=[books[0], "A record, and no more.", books[1], some[5]],
        validation=[some[2] + some[3], "A record, and no more. "],
        test=[changed(some[8], 3, draw), changed(some[9], 200, draw)],
    )
    every = own.train + own.validation + own.test
    near = naive_near({part for text in every for part in pieces(text, PIECE)})
    left, _ = without_held_out(own, "Ann")
    assert (left.validation, left.test) == (own.validation, own.test)
    assert "".join(left.train) == naively_without(own, near)
    gone = "".join(some[:2]), "".join(some[4:8]), "".join(some[9:])
    assert left.train == [*gone, books[1], some[5]]


def test_instructions_that_are_held_out_leave_training() -> None:
    a, b, c = (Instruction(f"What is {n}?", "a number") for n in ("one", "two", "three"))
    left, removed = without_held_out(Texts([a, b, c, b], [b], [c]), "Ann")
    assert (left.train, removed) == ([a], 3)
    with pytest.raises(CoterieError, match=r"^Ann: data\.dedup.* removes the whole train .*\(2 "):
        without_held_out(Texts([b, c], [b], [c]), "Ann")

"""Parts of a data set: its own validation and test, a public set, and excluded records."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from divisions import divide, items, labels, public_of
from questions import write

from coterie.data.spec import DataSpec, InstructionSpec

SIZES = {"art": 120, "law": 80, "war": 200}
"""Training records of each label; of validation there are half as many, and of test a quarter."""
HELD = {"valid": {"art": 60, "law": 40, "war": 100}, "test": {"art": 30, "law": 20, "war": 50}}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Records whose text is "label split number", all alike in length."""
    folder = tmp_path_factory.mktemp("splits")
    sizes = {"records": SIZES, "valid": HELD["valid"], "test": HELD["test"] | {"new": 40}}
    for split, counts in sizes.items():
        texts = [f"{k} {split:<10} {n:05d}" for k, count in counts.items() for n in range(count)]
        asked = [{"label": t[:3], "text": t, "output": f"{t[:3]} of {split}"} for t in texts]
        write(folder / f"{split}.jsonl", *(row | {"instruction": "Which?"} for row in asked))
    (folder / "book.txt").write_text("line\n" * 1000)
    return folder


WAYS: list[dict[str, Any]] = [
    {"by": "label"},
    {"by": "dirichlet", "clients": 3, "alpha": 1},
    {"by": "mixture", "share": 0.5},
    {"by": "mixtures", "mixtures": {"ann": {"art": 0.25, "war": 0.75}, "ben": {"art": 1}}},
]
OWN: dict[str, Any] = {"validation": "valid.jsonl", "test": "test.jsonl"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["by"])
def test_own_splits_are_dealt_in_the_shares_of_training(root, way) -> None:
    divided = divide(root, **way, **OWN)
    trained = labels(chain(*(texts.train for texts in divided.values())))
    for split, part in (("validation", 2), ("test", 4)):
        held = [text for texts in divided.values() for text in getattr(texts, split)]
        assert len(set(held)) == len(held)
        assert labels(held) == {label: SIZES[label] // part for label in trained}
        for texts in divided.values():
            counts = labels(getattr(texts, split))
            for label, count in labels(texts.train).items():
                wanted = count / trained[label] * SIZES[label] / part
                assert counts[label] == pytest.approx(wanted, abs=1)
            assert counts.keys() <= labels(texts.train).keys()
            assert {text.split()[1] for text in texts.train} == {"records"}  # none is held out
    assert way["by"] not in ("label", "dirichlet") or trained == SIZES


def test_uniform_own_splits_have_all_labels_alike(root) -> None:
    divided = divide(root, by="label", held_out="uniform", test="test.jsonl")
    for texts in divided.values():
        for label, size in {**HELD["test"], "new": 40}.items():
            assert labels(texts.test)[label] == pytest.approx(size / 3, abs=1)
        assert len(set(labels(texts.validation).values())) == 1
    assert sum(len(texts.test) for texts in divided.values()) == 100 + 40


def test_evenly_own_splits_are_everybodys(root) -> None:
    divided = divide(root, by="even", clients=4, public=True, **OWN)
    first = divided["client-1"]
    assert (len(first.validation), len(first.test)) == (200, 140)
    assert all((t.validation, t.test) == (first.validation, first.test) for t in divided.values())
    assert {len(t.train) for t in (*divided.values(), public_of(divided))} == {400 // 5}


@pytest.mark.parametrize("way", [{"by": "label"}, {"by": "even", "clients": 2}])
def test_the_choices_of_instructions_are_found_in_all_splits(root, way) -> None:
    data = DataSpec(instructions=InstructionSpec(template="{{ text }}"))
    divided = divide(root, data, **way, **OWN)
    assert {len(item.choices) for item in items(*divided.values())} == {10}
    assert {item.answer for t in divided.values() for item in t.test} >= {"art of test"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["by"])
@pytest.mark.parametrize("own", [{}, {"test": "test.jsonl"}, {"held_out": "uniform"}])
def test_a_public_set_is_mixed_of_all_clients_labels(root, way, own) -> None:
    public = public_of(divide(root, **way, **own, public=0.2)).train
    wanted = {
        "label": SIZES,
        "dirichlet": SIZES,
        "mixture": dict.fromkeys(SIZES, 80),
        # 120 of art are asked for 1.25 times: each client could have 96.
        "mixtures": {"art": 120, "war": 72},
    }[way["by"]]
    counts, half = labels(public), labels(public[: len(public) // 2])
    assert counts.keys() == wanted.keys()
    for label, count in wanted.items():
        assert counts[label] == pytest.approx(0.2 * count, abs=1)
        assert half[label] == pytest.approx(counts[label] / 2, abs=1)  # what a limit keeps


def test_records_are_left_out_by_an_expression(root) -> None:
    divided = divide(root, by="label", where="label != 'law' and text[-1] | int < 5", **OWN)
    assert list(divided) == ["art", "war"]
    assert {text[-1] for text in items(*divided.values())} == set("01234")
    assert len(divided["art"].train) == SIZES["art"] // 2
    sources = {"art": "records.jsonl", "book": "book.txt"}
    both = divide(root, source=sources, by="label", where="label == 'art'")
    assert len(both["art"].train) == 0.8 * SIZES["art"]
    assert len(both["book"].train) == 3  # text files have no fields

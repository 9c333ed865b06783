"""What a data set brings: its own validation and test, a public set, and records to leave out."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest

from coterie.data.division.divide import Division, divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec, InstructionSpec
from coterie.errors import CoterieError

SIZES = {"art": 120, "law": 80, "war": 200}
"""Training records of each label; of validation there are half as many, and of test a quarter."""


def write(file: Path, split: str, sizes: dict[str, int]) -> None:
    """Records whose text is "label split number", all alike in length."""
    texts = [f"{label} {split:<10} {n:05d}" for label, size in sizes.items() for n in range(size)]
    records = [
        {"label": text[:3], "text": text, "instruction": text, "output": f"{text[:3]} of {split}"}
        for text in texts
    ]
    file.write_text("\n".join(map(json.dumps, records)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", "train", SIZES)
    write(tmp_path / "valid.jsonl", "validation", {k: n // 2 for k, n in SIZES.items()})
    write(tmp_path / "test.jsonl", "test", {k: n // 4 for k, n in SIZES.items()} | {"new": 40})
    return tmp_path


def divide(root: Path, data: DataSpec | None = None, seed: int = 0, **options: Any) -> Division:
    values = {"source": "train.jsonl", **options}
    return divided_texts(DivideSpec.model_validate(values), data or DataSpec(), root, seed)


def labels(texts: Iterable[str]) -> Counter[str]:
    return Counter(text[:3] for text in texts)


WAYS: list[dict[str, Any]] = [
    {"by": "label"},
    {"by": "dirichlet", "clients": 3, "alpha": 1},
    {"by": "mixture", "share": 0.5},
    {"by": "mixtures", "mixtures": {"ann": {"art": 0.25, "war": 0.75}, "ben": {"art": 1}}},
]
OWN: dict[str, Any] = {"validation": "valid.jsonl", "test": "test.jsonl"}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["by"])
def test_own_splits_are_dealt_in_the_shares_of_training(root: Path, way: dict[str, Any]) -> None:
    divided = divide(root, **way, **OWN)
    trained = sum((labels(texts.train) for texts in divided.values()), Counter())
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
    train = list(chain(*(texts.train for texts in divided.values())))
    assert len(set(train)) == len(train)
    assert {text.split()[1] for text in train} == {"train"}  # nothing of it is held out
    if way["by"] in ("label", "dirichlet"):
        assert labels(train) == SIZES


def test_one_split_of_its_own_leaves_the_other_to_fractions(root: Path) -> None:
    for way in WAYS:
        for texts in divide(root, **way, test="test.jsonl").values():
            assert {text.split()[1] for text in texts.validation} == {"train"}
            assert {text.split()[1] for text in texts.test} == {"test"}
            assert not set(texts.validation) & set(texts.train)


def test_uniform_own_splits_have_all_labels_alike(root: Path) -> None:
    divided = divide(root, by="label", held_out="uniform", test="test.jsonl")
    for texts in divided.values():
        for label, size in {"art": 30, "law": 20, "war": 50, "new": 40}.items():
            assert labels(texts.test)[label] == pytest.approx(size / 3, abs=1)
        assert len(set(labels(texts.validation).values())) == 1
    assert sum(len(texts.test) for texts in divided.values()) == 100 + 40


def test_evenly_own_splits_are_everybodys(root: Path) -> None:
    divided = divide(root, by="even", clients=4, public=True, **OWN)
    first = divided["client-1"]
    assert (len(first.validation), len(first.test)) == (200, 140)
    assert all((t.validation, t.test) == (first.validation, first.test) for t in divided.values())
    assert divided.public is not None
    assert {len(texts.train) for texts in (*divided.values(), divided.public)} == {400 // 5}


def test_the_choices_of_instructions_are_found_in_all_splits(root: Path) -> None:
    for name in ("train", "valid", "test"):
        lines = map(json.loads, (root / f"{name}.jsonl").read_text().splitlines())
        asked = [json.dumps(line | {"instruction": "Which?"}) for line in lines]
        (root / f"{name}.jsonl").write_text("\n".join(asked))
    data = DataSpec(instructions=InstructionSpec(template="{{ text }}"))
    ways: list[dict[str, Any]] = [{"by": "label"}, {"by": "even", "clients": 2}]
    for way in ways:
        divided = divide(root, data, **way, **OWN)
        items = [i for t in divided.values() for split in vars(t).values() for i in split]
        assert {len(item.choices) for item in items} == {10}
        assert {item.answer for t in divided.values() for item in t.test} >= {"art of test"}


def test_a_hub_data_sets_own_splits_are_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*names: object, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": [f"{split} {i}" for i in range(40)]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    divided = divide(
        root, source="some/glue", subset="rte", by="even", clients=4, test="dev", validation="dev2"
    )
    assert asked == [("some/glue", "rte", split) for split in ("train", "dev2", "dev")]
    assert sorted(divided["client-1"].test) == sorted(f"dev {i}" for i in range(40))
    assert len(divided["client-1"].train) == 10


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["by"])
@pytest.mark.parametrize("own", [{}, {"test": "test.jsonl"}, {"held_out": "uniform"}])
def test_a_public_set_is_mixed_of_all_clients_labels_and_nobodys(
    root: Path, way: dict[str, Any], own: dict[str, Any]
) -> None:
    plain, divided = divide(root, **way, **own), divide(root, **way, **own, public=0.2)
    assert plain.public is None
    assert divided.public is not None
    public = divided.public.train
    every = [t for texts in divided.values() for split in vars(texts).values() for t in split]
    assert len(set(public)) == len(public)
    assert not set(public) & set(every)
    wanted = {
        "label": SIZES,
        "dirichlet": SIZES,
        "mixture": dict.fromkeys(SIZES, 80),
        # 120 of art are asked for 1.25 times: each client could have 96.
        "mixtures": {"art": 120, "war": 72},
    }[way["by"]]
    counts = labels(public)
    assert counts.keys() == wanted.keys()
    for label, count in wanted.items():
        assert counts[label] == pytest.approx(0.2 * count, abs=1)
    half = labels(public[: len(public) // 2])  # what a limit keeps has the same mix
    assert all(half[label] == pytest.approx(counts[label] / 2, abs=1) for label in counts)
    assert divide(root, **way, **own, public=0.2) == divided


def test_records_are_left_out_by_an_expression(root: Path) -> None:
    divided = divide(root, by="label", where="label != 'law' and text[-1] | int < 5", **OWN)
    assert list(divided) == ["art", "war"]
    used = [t for texts in divided.values() for split in vars(texts).values() for t in split]
    assert {text[-1] for text in used} == set("01234")
    assert len(divided["art"].train) == SIZES["art"] // 2
    (root / "book.txt").write_text("line\n" * 1000)
    sources = {"art": "train.jsonl", "book": "book.txt"}
    both = divide(root, source=sources, by="label", where="label == 'art'")
    assert len(both["art"].train) == 0.8 * SIZES["art"]
    assert len(both["book"].train) == 3  # text files have no fields


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("outptu | wordcount > 3", r"line 1 of .* has no field outptu \(did you mean output"),
        ("output >", "divide.where is not a valid Jinja expression"),
        ("output > 3", "divide.where cannot be evaluated for .*not supported"),
        ("label == 'none'", "no records that contain text.*divide.where"),
    ],
)
def test_expressions_that_do_not_fit_are_told(root: Path, where: str, sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        divide(root, by="label", where=where)


def test_no_instructions_left_are_told(root: Path) -> None:
    data = DataSpec(instructions=InstructionSpec(template="plain"))
    with pytest.raises(CoterieError, match=r"no train record satisfies divide\.where; correct"):
        divide(root, data, by="label", where="false")

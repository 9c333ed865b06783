"""Even division: equal parts at random, perhaps a public one, and the same held-out for all."""

import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
from pydantic import ValidationError

from coterie.data.division.divide import Division, divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.items import Instruction
from coterie.data.spec import DataSpec, Fractions, InstructionSpec
from coterie.data.texts import SPLITS
from coterie.errors import CoterieError

RECORDS = 108
"""With a tenth (10) set aside twice, 88 are left: four parts of 22, or five of 17 and 3 over."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Records without labels."""
    lines = [
        json.dumps({"text": f"text {i:03d}", "instruction": f"ask {i}", "output": f"say {i}"})
        for i in range(RECORDS)
    ]
    (tmp_path / "rte.jsonl").write_text("\n".join(lines))
    return tmp_path


def divide(root: Path, seed: int = 0, data: DataSpec | None = None, **options: Any) -> Division:
    values = {"source": "rte.jsonl", "by": "even", "clients": 4, **options}
    return divided_texts(DivideSpec.model_validate(values), data or DataSpec(), root, seed)


def test_clients_have_equally_many_records_of_their_own_and_one_held_out(root: Path) -> None:
    divided = divide(root)
    assert list(divided) == ["client-1", "client-2", "client-3", "client-4"]
    assert divided.public is None
    assert divided.labels == {}
    first = divided["client-1"]
    for texts in divided.values():
        assert len(texts.train) == 22
        assert (texts.validation, texts.test) == (first.validation, first.test)
    assert len(first.validation) == len(first.test) == 10
    trains = [texts.train for texts in divided.values()]
    everything = list(chain(first.validation, first.test, *trains))
    assert sorted(everything) == [f"text {i:03d}" for i in range(RECORDS)]


def test_the_public_part_is_one_more_of_the_same_size(root: Path) -> None:
    divided = divide(root, public=True)
    assert list(divided) == ["client-1", "client-2", "client-3", "client-4"]
    public = divided.public
    assert public is not None
    assert [len(texts.train) for texts in (*divided.values(), public)] == [17] * 5
    assert (public.validation, public.test) == tuple(
        getattr(divided["client-2"], split) for split in SPLITS[1:]
    )
    trains = [texts.train for texts in (*divided.values(), public)]
    used = list(chain(public.validation, public.test, *trains))
    assert len(used) == len(set(used)) == RECORDS - 3


def test_one_client_can_take_one_of_five_parts(root: Path) -> None:
    """FedMKT's one-to-one setting: the same parts as with four clients, of which three are left."""
    one, four = divide(root, clients=1, parts=5, public=True), divide(root, public=True)
    assert list(one) == ["client-1"]
    assert one["client-1"] == four["client-1"]
    assert one.public is not None
    assert len(one.public.train) == 17
    assert one.public.train == four["client-2"].train


def test_parts_are_for_all_who_take_one_and_for_even_divisions() -> None:
    even = {"source": "x", "by": "even", "clients": 4}
    with pytest.raises(ValidationError, match="clients and the public set need 5; set it to 5"):
        DivideSpec.model_validate({**even, "parts": 4, "public": True})
    with pytest.raises(ValidationError, match="by label does not use parts; remove it"):
        DivideSpec.model_validate({"source": "x", "by": "label", "parts": 4})
    assert DivideSpec.model_validate({**even, "parts": 4}).taken == 4


def test_fractions_are_of_all_records_however_many_clients(root: Path) -> None:
    data = DataSpec(fractions=Fractions(validation=0.25, test=0.5))
    for clients in (1, 3, 27):
        divided = divide(root, data=data, clients=clients)
        for texts in divided.values():
            assert (len(texts.validation), len(texts.test)) == (27, 54)
            assert len(texts.train) == 27 // clients


def test_who_gets_a_record_is_chance_that_follows_the_seed(root: Path) -> None:
    assert divide(root, public=True) == divide(root, public=True) != divide(root, 1, public=True)
    places: Counter[str] = Counter()
    for seed in range(400):
        divided = divide(root, seed, public=True)
        public = divided.public
        assert public is not None
        splits = {name: texts.train for name, texts in divided.items()}
        splits |= {"public": public.train, "validation": public.validation, "test": public.test}
        places[next((name for name, part in splits.items() if "text 007" in part), "unused")] += 1
    parts = {**dict.fromkeys([*divide(root), "public"], 17), "validation": 10, "test": 10}
    for place, size in {**parts, "unused": 3}.items():
        share = size / RECORDS
        error = (400 * share * (1 - share)) ** 0.5
        assert abs(places[place] - 400 * share) < 4.5 * error


def test_instructions_need_no_label_either(root: Path) -> None:
    data = DataSpec(instructions=InstructionSpec(template="plain"))
    divided = divide(root, data=data, public=True)
    public = divided.public
    assert public is not None
    items = [item for texts in (*divided.values(), public) for item in texts.train]
    assert all(isinstance(item, Instruction) for item in items)
    assert len({item.answer for item in items}) == 5 * 17
    assert {len(texts.train) for texts in divided.values()} == {17}


def test_text_files_are_dealt_in_pieces_and_labels_sources_together(root: Path) -> None:
    (root / "book.txt").write_text("".join(f"line {i:04d}\n" for i in range(1000)))
    divided = divide(root, source="book.txt", piece=50, clients=2)
    first, second = divided.values()
    pieces = [*first.validation, *first.test, *first.train, *second.train]
    assert len(first.train) == len(second.train)
    assert max(map(len, pieces)) < 100
    lines = "".join(pieces).splitlines()
    assert len(set(lines)) == len(lines) > 980  # one piece of ten lines at most is left over
    template = InstructionSpec(template="Go on: {{ text }}", answer="{{ 'more' }}")
    asked = divide(
        root, data=DataSpec(instructions=template), source="book.txt", piece=50, clients=2
    )
    assert len(asked["client-1"].train) == len(first.train)
    both = divide(root, source={"a": "rte.jsonl", "b": "book.txt"}, piece=50, clients=2)
    kinds = Counter(text[:4] for texts in both.values() for text in texts.train)
    assert kinds["text"] > 50
    assert kinds["line"] > 50
    assert both.labels == {}


def test_a_hub_data_set_needs_no_label(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*names: object, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(40)]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    divided = divide(root, source="some/glue", subset="rte", split="validation")
    assert asked == [("some/glue", "rte", "validation")]
    assert [len(texts.train) for texts in divided.values()] == [8] * 4


def test_too_few_records_are_said(root: Path) -> None:
    wanted = r"divide: 108 records are too few for 90 equal parts; .* or lower divide\.clients"
    with pytest.raises(CoterieError, match=wanted):
        divide(root, clients=89, public=True)
    assert len(divide(root, clients=88)) == 88
    with pytest.raises(CoterieError, match="are too few for 4 equal parts"):
        divide(root, data=DataSpec(fractions=Fractions(test=0.009)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clients": None}, "dividing by even needs clients; set divide.clients"),
        ({"held_out": "uniform"}, "dividing by even does not use held_out; remove it"),
        ({"alpha": 1}, "dividing by even does not use alpha; remove it"),
        ({"share": 0.5}, "dividing by even does not use share; remove it"),
        ({"public": 0.1}, "dividing by even needs divide.public to be true"),
        ({"balanced": True}, "dividing by even does not use balanced; remove it"),
        (
            {"by": "label", "clients": None, "public": True},
            "dividing by label needs divide.public to be a fraction, such as 0.1",
        ),
        (
            {"by": "dirichlet", "alpha": 1, "public": True},
            "dividing by dirichlet needs divide.public to be a fraction",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        DivideSpec.model_validate({"source": "x", "by": "even", "clients": 4, **options})

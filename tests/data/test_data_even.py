"""Even division: equal parts at random, perhaps a public one, and the same held-out for all."""

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from divisions import divide, public_of
from questions import write

from coterie.data.division.spec import DivideSpec
from coterie.data.items import Instruction
from coterie.data.spec import DataSpec, Fractions, InstructionSpec

RECORDS = 108
"""With a tenth (10) set aside twice, 88 are left: four parts of 22, or five of 17 and 3 over."""
EVEN = {"by": "even", "clients": 4}
FIVE = {**EVEN, "public": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Records without labels."""
    folder, numbers = tmp_path_factory.mktemp("even"), range(RECORDS)
    asked = [{"text": f"text {i:03d}", "instruction": f"ask {i}", "output": i} for i in numbers]
    write(folder / "records.jsonl", *asked)
    (folder / "book.txt").write_text("".join(f"line {i:04d}\n" for i in range(1000)))
    return folder


def test_clients_have_equally_many_records_of_their_own_and_one_held_out(root) -> None:
    divided = divide(root, **EVEN)
    assert list(divided) == ["client-1", "client-2", "client-3", "client-4"]
    assert len(divide(root, by="even", clients=88)) == 88
    assert (divided.public, divided.labels) == (None, {})
    first = divided["client-1"]
    assert {len(texts.train) for texts in divided.values()} == {22}
    assert len(first.validation) == len(first.test) == 10
    used = chain(first.validation, first.test, *(texts.train for texts in divided.values()))
    assert sorted(used) == [f"text {i:03d}" for i in range(RECORDS)]


def test_the_public_part_is_another_of_the_same_size(root) -> None:
    divided = divide(root, **FIVE)
    public, second = public_of(divided), divided["client-2"]
    assert [len(texts.train) for texts in (*divided.values(), public)] == [17] * 5
    assert (public.validation, public.test) == (second.validation, second.test)
    # FedMKT's one-to-one setting: the same five parts, of which three are left.
    alone = divide(root, **{**FIVE, "clients": 1}, parts=5)
    assert alone == {"client-1": divided["client-1"]}
    assert public_of(alone).train == second.train
    assert DivideSpec.model_validate({"source": "x", **EVEN, "parts": 4}).taken == 4


@pytest.mark.parametrize("clients", [1, 3, 27])
def test_fractions_are_of_all_records_however_many_clients(root, clients) -> None:
    data = DataSpec(fractions=Fractions(validation=0.25, test=0.5))
    sizes = (27 // clients, 27, 54)
    for texts in divide(root, data, by="even", clients=clients).values():
        assert tuple(map(len, vars(texts).values())) == sizes


def test_who_gets_a_record_is_chance(root) -> None:
    places: Counter[str] = Counter()
    for seed in range(400):
        divided = divide(root, seed=seed, **FIVE)
        public = public_of(divided)
        splits = {name: texts.train for name, texts in divided.items()}
        splits |= {"public": public.train, "validation": public.validation, "test": public.test}
        places[next((name for name, part in splits.items() if "text 007" in part), "unused")] += 1
    parts = {**dict.fromkeys([*divide(root, **EVEN), "public"], 17), "validation": 10, "test": 10}
    for place, size in {**parts, "unused": 3}.items():
        share = size / RECORDS
        error = (400 * share * (1 - share)) ** 0.5
        assert abs(places[place] - 400 * share) < 4.5 * error


def test_instructions_need_no_label_either(root) -> None:
    divided = divide(root, DataSpec(instructions=InstructionSpec(template="plain")), **FIVE)
    items = [item for texts in (*divided.values(), public_of(divided)) for item in texts.train]
    assert all(isinstance(item, Instruction) for item in items)
    assert len({item.answer for item in items}) == 5 * 17
    assert {len(texts.train) for texts in divided.values()} == {17}


def test_text_files_are_dealt_in_pieces_and_labels_sources_together(root) -> None:
    options = {"by": "even", "piece": 50, "clients": 2}
    first, second = divide(root, source="book.txt", **options).values()
    pieces = [*first.validation, *first.test, *first.train, *second.train]
    assert len(first.train) == len(second.train)
    assert max(map(len, pieces)) < 100
    lines = "".join(pieces).splitlines()
    assert len(set(lines)) == len(lines) > 980  # one piece of ten lines at most is left over
    template = InstructionSpec(template="Go on: {{ text }}", answer="{{ 'more' }}")
    asked = divide(root, DataSpec(instructions=template), source="book.txt", **options)
    assert len(asked["client-1"].train) == len(first.train)
    both = divide(root, source={"a": "records.jsonl", "b": "book.txt"}, **options)
    kinds = Counter(text[:4] for texts in both.values() for text in texts.train)
    assert min(kinds["text"], kinds["line"]) > 50
    assert both.labels == {}


def test_a_hub_data_set_needs_no_label(root, hub) -> None:
    asked = hub(lambda split: {"text": [f"{split} {i}" for i in range(40)]})
    glue = {**EVEN, "source": "some/glue", "subset": "rte"}
    assert [len(t.train) for t in divide(root, split="dev", **glue).values()] == [8] * 4
    divided = divide(root, test="dev", validation="dev2", **glue)
    splits = ("dev", "train", "dev2", "dev")
    assert asked == [("some/glue", "rte", split) for split in splits]
    assert sorted(divided["client-1"].test) == sorted(f"dev {i}" for i in range(40))
    assert len(divided["client-1"].train) == 10

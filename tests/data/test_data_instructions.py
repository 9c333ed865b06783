"""Records as prompts with answers: choices, splits, divisions, tokens and what the loss counts."""

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from divisions import divide, items
from public_text import public_text
from questions import SHORT, records, rows, write

from coterie.data.division.divide import Division
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import ClientSpec, DataSpec, Fractions, InstructionSpec
from coterie.data.texts import client_texts
from coterie.errors import CoterieError

# --- choices ------------------------------------------------------------------


def test_choices_are_the_answers_of_the_same_task() -> None:
    given = records(
        {"instruction": "colour?", "input": "a", "output": "red"},
        {"instruction": "number?", "input": "b", "output": 2},
        {"instruction": "colour?", "input": "c", "output": " blue\n"},
        {"instruction": "number?", "input": "d", "output": 1.5},
        {"instruction": "why?", "input": "e", "output": "because"},
        {"input": "f", "output": "left"},
        {"input": "g", "output": "right"},
    )
    samples = instructions(given, SHORT)
    assert [getattr(item, "prompt", "") for item in samples] == [f"{c}:" for c in "abcdefg"]
    answers = ["red", "2", "blue", "1.5", "because", "left", "right"]
    assert [item.answer for item in samples] == answers
    colours, numbers, sides = ("blue", "red"), ("1.5", "2"), ("left", "right")
    choices = [colours, numbers, colours, numbers, (), sides, sides]
    assert [item.choices for item in samples] == choices


@pytest.mark.parametrize(("count", "choices"), [(1, 0), (2, 2), (20, 20), (21, 0)])
def test_two_to_twenty_answers_are_a_choice(count: int, choices: int) -> None:
    given = records(*({"input": "x", "output": f"a{i:02d}"} for i in range(count)))
    for item in instructions(given, SHORT):
        assert len(item.choices) == choices


def test_choices_given_as_a_list_or_a_field() -> None:
    listed: Any = ["no", "yes", 3]
    spec = InstructionSpec(template="{{ q }}", answer="a", choices=listed)
    asked = records({"q": "?", "a": 3}, {"q": "?", "a": "yes"})
    assert {item.choices for item in instructions(asked, spec)} == {("no", "yes", "3")}
    spec = InstructionSpec(template="{{ q }}", answer="a", choices="options")
    first, second = {"a": "x", "options": ["y", "x"]}, {"a": 1, "options": [1, 2, "1"]}
    own = records({"q": "?", **first}, {"q": "?", **second})
    assert [item.choices for item in instructions(own, spec)] == [("y", "x"), ("1", "2")]


def test_choices_made_by_a_template_stand_one_a_line() -> None:
    answer, choices = (
        "{{ options.text[options.label.index(key)] }}",
        "{{ options.text|join('\n') }}",
    )
    spec = InstructionSpec(template="{{ q }}", answer=answer, choices=choices)
    two = {"label": ["1", "2"], "text": ["the moon", " a star"]}
    three = {"label": ["A", "B", "C"], "text": ["x: y", "7", "x: y"]}
    asked = [{"q": "?", "key": "2", "options": two}, {"q": "?", "key": "C", "options": three}]
    samples = instructions(records(*asked), spec)
    assert [item.answer for item in samples] == ["a star", "x: y"]
    assert [item.choices for item in samples] == [("the moon", "a star"), ("x: y", "7")]


UNUSABLE_RECORDS = [
    ({"q": "?"}, None, "has no field output; its fields are: q"),
    ({"output": "a"}, None, "has no field q; its fields are: output"),
    ({"q": "?", "output": ""}, None, "field output contains '', not an answer"),
    ({"q": "?", "output": " \n"}, None, "not an answer"),
    ({"q": "?", "output": None}, None, "contains None, not an answer"),
    ({"q": "?", "output": True}, None, "contains True, not an answer"),
    ({"q": "?", "output": ["a"]}, None, r"contains \['a'\], not an answer .* fix the"),
    ({"q": "?", "output": "\ud83d"}, None, "half a character"),
    ({"q": "", "output": "a"}, None, "gives an empty text"),
    ({"q": "?", "output": "a"}, ["b", "c"], r"'a' is not one of the choices \(b, c\); fix"),
    ({"q": "?", "output": "a"}, "{{ 'b\nd' }}", r"'a' is not one of the choices \(b, d\); fix"),
    ({"q": "?", "output": "a"}, "{{ options|join('\n') }}", "has no field options"),
    ({"q": "?", "output": "a"}, "options", "has no field options"),
    ({"q": "?", "output": "a", "o": "a b"}, "o", "field o contains 'a b', not a list"),
    ({"q": "?", "output": "a", "o": ["a", ""]}, "o", "field o contains '', not an ans"),
]


@pytest.mark.parametrize(("fields", "choices", "sentence"), UNUSABLE_RECORDS)
def test_a_record_that_cannot_be_used_is_named(fields, choices, sentence) -> None:
    spec = InstructionSpec(template="{{ q }}", choices=choices)
    given = records({"q": "?", "output": "b", "o": ["a", "b"], "options": ["a", "b"]}, fields)
    with pytest.raises(CoterieError, match=rf"^line 2 of x\.jsonl.* ?{sentence}"):
        instructions(given, spec)


# --- a client's own files -----------------------------------------------------


def test_a_client_s_samples_are_split_by_number_and_keep_their_order(tmp_path: Path) -> None:
    given = rows(200)
    given[7]["input"] = "a very long case " * 200  # counts as one sample
    write(tmp_path / "own.jsonl", *given)
    spec = ClientSpec(name="anna", path="own.jsonl")
    data = DataSpec(instructions=SHORT, fractions=Fractions(validation=0.2, test=0.1))
    texts = client_texts(spec, data, tmp_path, seed=1)
    assert [len(split) for split in vars(texts).values()] == [140, 40, 20]
    order = [f"{row['input']}:" for row in given]
    for split in vars(texts).values():
        places = [order.index(item.prompt) for item in split]
        assert places == sorted(places)
    everything = [item for split in vars(texts).values() for item in split]
    assert Counter(item.prompt for item in everything) == Counter(order)
    assert {item.choices for item in everything} == {("no", "yes")}
    assert client_texts(spec, data, tmp_path, seed=1) == texts
    assert client_texts(spec, data, tmp_path, seed=2) != texts


def test_given_splits_are_whole_and_find_their_choices_together(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", *(r for r in rows(80) if r["output"] == "yes"))
    write(tmp_path / "test.jsonl", *(r for r in rows(6) if r["output"] == "no"))
    spec = ClientSpec(name="anna", train="train.jsonl", test="test.jsonl")
    texts = client_texts(spec, DataSpec(instructions=SHORT), tmp_path, seed=0)
    assert [item.prompt for item in texts.test] == ["case 1:", "case 3:", "case 5:"]
    assert (len(texts.train), len(texts.validation)) == (36, 4)
    assert {i.choices for i in texts.train + texts.test} == {("no", "yes")}


def test_plain_text_has_no_fields(tmp_path: Path, tokenizer) -> None:
    (tmp_path / "notes.txt").write_text("text")
    spec = ClientSpec(name="anna", path=".")
    data = DataSpec(instructions=SHORT, public="notes.txt")
    wanted = r"notes\.txt is plain text without fields; convert it to \.jsonl"
    with pytest.raises(CoterieError, match=f"^Client anna: .*{wanted}"):
        client_texts(spec, data, tmp_path, seed=0)
    with pytest.raises(CoterieError, match=f"^The public text: .*{wanted}"):
        public_text(data, tmp_path, tokenizer)


# --- division -----------------------------------------------------------------

ANSWERS = ("no", "yes")


def divided(root: Path, how: InstructionSpec = SHORT, **options: Any) -> Division:
    return divide(root, DataSpec(instructions=how), **options)


def test_records_are_divided_by_their_label(tmp_path) -> None:
    write(tmp_path / "all.jsonl", *rows(60), *rows(40, start=60))
    parts = divided(tmp_path, source="all.jsonl", by="label", label="output")
    assert list(parts) == ["no", "yes"]
    for name, texts in parts.items():
        assert [len(split) for split in vars(texts).values()] == [40, 5, 5]
        assert {item.answer for item in items(texts)} == {name}
        assert {item.choices for item in items(texts)} == {("no", "yes")}  # of the whole data set
    assert parts.labels == {"no": {"no": 40}, "yes": {"yes": 40}}
    write(tmp_path / "more.jsonl", *rows(200))
    mixtures = {"anna": {"yes": 0.7, "no": 0.3}, "ben": {"yes": 0.3, "no": 0.7}}
    options = {"by": "mixtures", "label": "output", "mixtures": mixtures}
    anna = divided(tmp_path, source="more.jsonl", **options)["anna"]
    assert Counter(item.answer for item in items(anna)) == {"yes": 70, "no": 30}


def test_one_task_per_client(tmp_path) -> None:
    write(tmp_path / "a.jsonl", *rows(50, instruction="same"))
    more = [{**row, "output": row["output"].upper()} for row in rows(30, instruction="same")]
    write(tmp_path / "b.jsonl", *more)
    parts = divided(tmp_path, source={"First task": "a.jsonl", "second": "b.jsonl"}, by="label")
    assert {k: len(items(texts)) for k, texts in parts.items()} == {"first-task": 50, "second": 30}
    assert {item.choices for item in items(parts["first-task"])} == {("no", "yes")}
    assert {item.choices for item in items(parts["second"])} == {("NO", "YES")}
    options = {"by": "dirichlet", "clients": 3, "alpha": 1, "balanced": True}
    skewed = divided(tmp_path, source={"x": "a.jsonl", "y": "b.jsonl"}, **options)
    assert len(items(*skewed.values())) == 80


def test_who_wrote_this(tmp_path) -> None:
    texts = {k: "".join(f"{k} wrote line {i}.\n" for i in range(300)) for k in ("ann", "bob")}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    how = InstructionSpec(template="{{ text }}Who wrote this?", answer="label")
    source = {name: f"{name}.txt" for name in texts}
    parts = divided(tmp_path, how, source=source, by="label", piece=100)
    for name, text in texts.items():
        own = items(parts[name])
        assert {item.answer for item in own} == {name}
        assert {item.choices for item in own} == {("ann", "bob")}
        asked = [item.prompt.removesuffix("Who wrote this?") for item in own]
        assert "".join(sorted(asked, key=text.index)) == text
        assert all(100 <= len(part) <= 200 for part in sorted(asked, key=text.index)[:-1])
    coarse = divided(tmp_path, how, source=source, by="label")
    assert len(items(coarse["ann"])) < len(items(parts["ann"])) / 10


def test_pieces_of_texts_follow_the_option_without_instructions(tmp_path) -> None:
    (tmp_path / "ann.txt").write_text("A line of text.\n" * 400)
    train = divide(tmp_path, source={"ann": "ann.txt"}, by="label", piece=50)["ann"].train
    assert {len(part) for part in train} == {64}


def test_a_hub_data_set_has_the_names_of_its_classes_as_answers(tmp_path, hub) -> None:
    classes = (("topic", ["x", "y"]), ("output", [*ANSWERS]))
    names = {field: datasets.ClassLabel(names=names) for field, names in classes}
    features = datasets.Features({**names, "input": datasets.Value("string")})
    inputs = [str(i) for i in range(40)]
    hub(lambda _: {"topic": [0, 0, 1, 1] * 10, "output": [0, 1] * 20, "input": inputs}, features)
    by_label = divided(tmp_path, source="some/set", by="label", label="topic")
    assert {name: len(items(texts)) for name, texts in by_label.items()} == {"x": 20, "y": 20}
    by_source = divided(tmp_path, source={"a": "some/set"}, by="label")
    for texts in (*by_label.values(), *by_source.values()):
        assert {item.answer for item in items(texts)} == {*ANSWERS}
        assert {item.choices for item in items(texts)} == {ANSWERS}
    assert not datasets.are_progress_bars_disabled()

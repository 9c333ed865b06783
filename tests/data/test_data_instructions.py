"""Records as prompts with answers: choices, splits, divisions, tokens and what the loss counts."""

from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest
from public_text import public_text
from questions import SHORT, data_of, records, rows, write
from transformers import PreTrainedTokenizerBase

from coterie.data.division.divide import divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import ClientSpec, DataSpec, Fractions, InstructionSpec, Limits
from coterie.data.texts import Texts, client_texts
from coterie.data.tokens import tokenise
from coterie.errors import CoterieError

TASKS = Path(__file__).parents[3] / "shared" / "data" / "instructions"

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
    found = instructions(given, SHORT)
    assert [item.prompt for item in found if isinstance(item, Instruction)] == [
        f"{letter}:" for letter in "abcdefg"
    ]
    answers = ["red", "2", "blue", "1.5", "because", "left", "right"]
    assert [item.answer for item in found] == answers
    assert [item.choices for item in found] == [
        ("blue", "red"),
        ("1.5", "2"),
        ("blue", "red"),
        ("1.5", "2"),
        (),
        ("left", "right"),
        ("left", "right"),
    ]


@pytest.mark.parametrize(("count", "choices"), [(1, 0), (2, 2), (20, 20), (21, 0)])
def test_two_to_twenty_answers_are_a_choice(count: int, choices: int) -> None:
    given = records(*({"input": "x", "output": f"a{i:02d}"} for i in range(count)))
    for item in instructions(given, SHORT):
        assert len(item.choices) == choices


def test_choices_given_as_a_list_or_a_field() -> None:
    spec = InstructionSpec.model_validate(
        {"template": "{{ q }}", "answer": "a", "choices": ["no", "yes", 3]}
    )
    asked = records({"q": "?", "a": 3}, {"q": "?", "a": "yes"})
    assert {item.choices for item in instructions(asked, spec)} == {("no", "yes", "3")}
    spec = InstructionSpec(template="{{ q }}", answer="a", choices="options")
    own = records(
        {"q": "?", "a": "x", "options": ["y", "x"]}, {"q": "?", "a": 1, "options": [1, 2, "1"]}
    )
    assert [item.choices for item in instructions(own, spec)] == [("y", "x"), ("1", "2")]


def test_choices_made_by_a_template_stand_one_a_line() -> None:
    spec = InstructionSpec(
        template="{{ q }}",
        answer="{{ options.text[options.label.index(key)] }}",
        choices="{{ options.text | join('\n') }}",
    )
    two = {"label": ["1", "2"], "text": ["the moon", " a star"]}
    three = {"label": ["A", "B", "C"], "text": ["x: y", "7", "x: y"]}
    asked = [{"q": "?", "key": "2", "options": two}, {"q": "?", "key": "C", "options": three}]
    found = instructions(records(*asked), spec)
    assert [item.answer for item in found] == ["a star", "x: y"]
    assert [item.choices for item in found] == [("the moon", "a star"), ("x: y", "7")]
    with pytest.raises(
        CoterieError, match=r"^line 1 .* 'b' is not one of the choices \(c, d\); fix"
    ):
        instructions(
            records({"q": "?", "a": "b"}),
            InstructionSpec(template="{{ q }}", answer="a", choices="{{ 'c\nd' }}"),
        )
    with pytest.raises(CoterieError, match=r"^line 1 of x\.jsonl has no field options"):
        instructions(records({"q": "?", "key": "A", "output": "a"}), spec)


@pytest.mark.parametrize(
    ("fields", "choices", "sentence"),
    [
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
        ({"q": "?", "output": "a"}, "options", "has no field options"),
        ({"q": "?", "output": "a", "o": "a b"}, "o", "field o contains 'a b', not a list"),
        ({"q": "?", "output": "a", "o": ["a", ""]}, "o", "field o contains '', not an ans"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(
    fields: dict[str, Any], choices: Any, sentence: str
) -> None:
    spec = InstructionSpec(template="{{ q }}", choices=choices)
    given = records({"q": "?", "output": "a", "o": ["a", "b"], "options": ["a", "b"]}, fields)
    if choices == ["b", "c"]:
        given[0].fields["output"] = "b"
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


def test_plain_text_has_no_fields(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "notes.txt").write_text("text")
    spec = ClientSpec(name="anna", path=".")
    data = DataSpec(instructions=SHORT, public="notes.txt")
    wanted = r"notes\.txt is plain text without fields; convert it to \.jsonl"
    with pytest.raises(CoterieError, match=f"^Client anna: .*{wanted}"):
        client_texts(spec, data, tmp_path, seed=0)
    with pytest.raises(CoterieError, match=f"^The public text: .*{wanted}"):
        public_text(data, tmp_path, tokenizer)
    divide = DivideSpec(source="notes.txt", by="label")
    with pytest.raises(CoterieError, match="plain text without labels"):
        divided_texts(divide, data, tmp_path, 0)


# --- division -----------------------------------------------------------------


def divide(root: Path, how: InstructionSpec = SHORT, seed: int = 0, **values: Any) -> Any:
    spec = DivideSpec.model_validate(values)
    return divided_texts(spec, DataSpec(instructions=how), root, seed)


def items(texts: Texts[Instruction]) -> list[Instruction]:
    return texts.train + texts.validation + texts.test


def test_records_are_divided_by_their_label(tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl", *rows(60), *rows(40, start=60))
    divided = divide(tmp_path, source="all.jsonl", by="label", label="output")
    assert list(divided) == ["no", "yes"]
    for name, texts in divided.items():
        assert [len(split) for split in vars(texts).values()] == [40, 5, 5]
        assert {item.answer for item in items(texts)} == {name}
        assert {item.choices for item in items(texts)} == {("no", "yes")}  # of the whole data set
    assert divided.labels == {"no": {"no": 40}, "yes": {"yes": 40}}
    write(tmp_path / "more.jsonl", *rows(200))
    mixed = divide(
        tmp_path,
        source="more.jsonl",
        by="mixtures",
        label="output",
        mixtures={"anna": {"yes": 0.7, "no": 0.3}, "ben": {"yes": 0.3, "no": 0.7}},
    )
    assert Counter(item.answer for item in items(mixed["anna"])) == {"yes": 70, "no": 30}
    with pytest.raises(CoterieError, match=r"line 1 of .*all\.jsonl has no field topic"):
        divide(tmp_path, source="all.jsonl", by="label", label="topic")


def test_one_task_per_client(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *rows(50, instruction="same"))
    more = [{**row, "output": row["output"].upper()} for row in rows(30, instruction="same")]
    write(tmp_path / "b.jsonl", *more)
    divided = divide(tmp_path, source={"First task": "a.jsonl", "second": "b.jsonl"}, by="label")
    assert {name: len(items(texts)) for name, texts in divided.items()} == {
        "first-task": 50,
        "second": 30,
    }
    assert {item.choices for item in items(divided["first-task"])} == {("no", "yes")}
    assert {item.choices for item in items(divided["second"])} == {("NO", "YES")}
    skewed = divide(
        tmp_path,
        source={"x": "a.jsonl", "y": "b.jsonl"},
        by="dirichlet",
        clients=3,
        alpha=1,
        balanced=True,
    )
    assert sum(len(items(texts)) for texts in skewed.values()) == 80


def test_who_wrote_this(tmp_path: Path) -> None:
    texts = {
        name: "".join(f"{name} wrote line {i}.\n" for i in range(300)) for name in ("ann", "bob")
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    how = InstructionSpec(template="{{ text }}Who wrote this?", answer="label")
    source = {name: f"{name}.txt" for name in texts}
    divided = divide(tmp_path, how, source=source, by="label", piece=100)
    for name, text in texts.items():
        own = items(divided[name])
        assert {item.answer for item in own} == {name}
        assert {item.choices for item in own} == {("ann", "bob")}
        asked = [item.prompt.removesuffix("Who wrote this?") for item in own]
        assert "".join(sorted(asked, key=text.index)) == text
        assert all(100 <= len(part) <= 200 for part in sorted(asked, key=text.index)[:-1])
    coarse = divide(tmp_path, how, source=source, by="label")
    assert len(items(coarse["ann"])) < len(items(divided["ann"])) / 10
    with pytest.raises(CoterieError, match=r"piece 1 of .*ann\.txt has no field output; its fi"):
        divide(tmp_path, InstructionSpec(template="{{ text }}"), source=source, by="label")


def test_pieces_of_texts_follow_the_option_without_instructions(tmp_path: Path) -> None:
    (tmp_path / "ann.txt").write_text("A line of text.\n" * 400)
    spec = DivideSpec(source={"ann": "ann.txt"}, by="label", piece=50)
    train = divided_texts(spec, DataSpec(), tmp_path, 0)["ann"].train
    assert {len(part) for part in train} == {64}


def test_a_hub_data_set_has_the_names_of_its_classes_as_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = datasets.Features(
        {
            "topic": datasets.ClassLabel(names=["x", "y"]),
            "output": datasets.ClassLabel(names=["no", "yes"]),
            "input": datasets.Value("string"),
        }
    )
    columns = {
        "topic": [0, 0, 1, 1] * 10,
        "output": [0, 1] * 20,
        "input": [str(i) for i in range(40)],
    }
    table = datasets.Dataset.from_dict(columns, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: table)
    by_label = divide(tmp_path, source="some/set", by="label", label="topic")
    assert {name: len(items(texts)) for name, texts in by_label.items()} == {"x": 20, "y": 20}
    by_source = divide(tmp_path, source={"a": "some/set"}, by="label")
    for texts in (*by_label.values(), *by_source.values()):
        assert {item.answer for item in items(texts)} == {"no", "yes"}
        assert {item.choices for item in items(texts)} == {("no", "yes")}


@pytest.mark.skipif(not TASKS.is_dir(), reason="needs the instruction tasks beside the repository")
def test_ten_tasks_for_ten_clients(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    source = {file.stem: file.name for file in sorted(TASKS.glob("*.jsonl"))}
    for name in source.values():
        start = (TASKS / name).read_text(encoding="utf-8").splitlines()[:300]
        (tmp_path / name).write_text("\n".join(start), encoding="utf-8")
    how = InstructionSpec(template="plain")
    data = DataSpec(instructions=how, limits=Limits(train=50, validation=20, test=20))
    divided = divide(tmp_path, how, source=source, by="label")
    assert len(divided) == 10
    for name, texts in divided.items():
        choices = {item.choices for item in items(texts)}
        assert len(choices) == 1
        assert len(choices.pop()) in (2, 3, 4, 6)
        split = data_of(tokenise(texts, tokenizer, data, name).train)
        assert len(split) == 50
        answers = [item.answer for item in split.items]
        assert len(set(answers)) > 1

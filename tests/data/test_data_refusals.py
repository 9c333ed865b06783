"""Sections of run files and divisions: defaults, and one sentence for what cannot be used."""

from pathlib import Path

import datasets
import pytest
from divisions import divide
from pydantic import ValidationError
from questions import write

from coterie.data.division.spec import DivideSpec
from coterie.data.spec import (
    ClientSpec,
    DataSpec,
    Limits,
    MessagesSpec,
    PreferenceSpec,
)
from coterie.errors import CoterieError

TEMPLATE = {"chat_template": "{{ messages }}"}
DATA = [
    ({"fractions": {"validation": 0.5, "test": 0.5}}, "leave no text to train on"),
    ({"limits": {"test": 128}}, "128 test tokens is too small for data.window 128.*at least 129"),
    ({"limits": {"public": 128}}, "public tokens is too small for data.window 128.*at least 129"),
    ({"text": []}, "at least 1 item"),
    ({"windows": 128}, "Extra inputs"),
    ({"instructions": {"templates": "alpaca"}}, "Extra inputs"),
    ({"instructions": {"template": ""}}, "at least 1 character"),
    ({"instructions": {"choices": ["yes"]}}, "at least 2 items"),
    ({"instructions": {"choices": [True, False]}}, "quote them"),
    ({"messages": True, "instructions": {}}, "data.instructions and data.messages are mutual"),
    ({"messages": "conversations"}, "valid dictionary"),
    (TEMPLATE, "data.chat_template has no effect without convers"),
    ({**TEMPLATE, "instructions": {"template": "plain"}}, "data.chat_template has no effect"),
    ({"preferences": True, "instructions": {}}, r"data\.preferences"),
    ({"preferences": True, "public": "x.jsonl"}, r"data\.preferences"),
]
CLIENTS = [
    ({"name": "anna"}, "client anna has neither path nor train"),
    ({"name": "anna", "path": "a", "train": "b"}, "has both"),
    ({"name": "anna", "path": "a", "test": "b"}, "test together with path"),
    ({"name": ".anna", "path": "a"}, "'.anna' must consist of 1 to 64 characters"),
    ({"name": "a/b", "path": "a"}, "'a/b' must consist of"),
    ({"name": "anna\n", "path": "a"}, "must consist of"),
    ({"name": "a" * 65, "path": "a"}, "must consist of"),
]
EVEN = {"by": "even", "clients": 4}
LABEL = {"by": "label"}
DIRICHLET = {"by": "dirichlet", "clients": 2}
BY_SOURCE = {"by": "label", "source": {"a": "x"}}
DIVIDE = [
    ({"by": "dirichlet", "alpha": 1}, "dirichlet needs clients; set divide.client"),
    (DIRICHLET, "dirichlet needs alpha; set divide.alpha"),
    (DIRICHLET | {"alpha": 0}, "greater than 0"),
    (DIRICHLET | {"clients": 0, "alpha": 1}, "greater than or equal to 1"),
    (DIRICHLET | {"alpha": 1, "public": True}, "dirichlet needs divide.public to be a fraction"),
    ({"by": "mixture"}, "mixture needs share; set divide.share"),
    ({"by": "mixture", "share": 1.5}, "less than or equal to 1"),
    ({"by": "mixture", "share": 0.5, "clients": 3}, "by mixture does not use clients"),
    ({"by": "mixtures"}, "mixtures needs mixtures; set divide.mixtures"),
    (LABEL | {"alpha": 0.1}, "by label does not use alpha; remove it"),
    (LABEL | {"parts": 4}, "by label does not use parts; remove it"),
    (LABEL | {"balanced": True}, "dividing by label does not use balanced; remove it"),
    (LABEL | {"public": True}, "by label needs divide.public to be a fraction, such as 0.1"),
    (LABEL | {"piece": 19}, "greater than or equal to 20"),
    (LABEL | {"source": {}}, "divide.source is empty; name a file"),
    (BY_SOURCE | {"subset": "y"}, "give each label its own"),
    (BY_SOURCE | {"test": "y"}, "divide.validation and divide.test need a single source"),
    (EVEN | {"parts": 4, "public": True}, "clients and the public set need 5; set it to 5"),
    (EVEN | {"clients": None}, "dividing by even needs clients; set divide.clients"),
    (EVEN | {"held_out": "uniform"}, "dividing by even does not use held_out; remove it"),
    (EVEN | {"alpha": 1}, "dividing by even does not use alpha; remove it"),
    (EVEN | {"share": 0.5}, "dividing by even does not use share; remove it"),
    (EVEN | {"public": 0.1}, "dividing by even needs divide.public to be true"),
    (EVEN | {"balanced": True}, "dividing by even does not use balanced; remove it"),
]
SHARES = "shares of client anna in divide.mixtures sum to 0.9999; they must sum to 1"
MIXTURES = [
    ({}, "divide.mixtures has no clients"),
    ({"anna": {"de": 0.7, "fr": 0.2999}}, SHARES),
    ({"anna": {}}, "client anna .* sum to 0;"),
    ({"a": {"de": 0}}, "greater than 0"),
    ({"a/b": {"de": 1}}, "'a/b' must consist of 1 to 64"),
]
SECTIONS = [
    *((DataSpec, {}, *row) for row in DATA),
    *((ClientSpec, {}, *row) for row in CLIENTS),
    *((DivideSpec, {"source": "news.jsonl"}, *row) for row in DIVIDE),
    *((DivideSpec, {"source": "x", "by": "mixtures"}, {"mixtures": m}, s) for m, s in MIXTURES),
]


@pytest.mark.parametrize(("section", "valid", "values", "sentence"), SECTIONS)
def test_a_section_that_cannot_be_used_is_refused(section, valid, values, sentence) -> None:
    with pytest.raises(ValidationError, match=sentence):
        section.model_validate(valid | values)


RECORDS = {
    "records": ["World", "Sports", "Business", "Sci/Tech"] * 27,
    "uneven": ["a"] * 500 + ["b"] * 20,
    "single": ["a"] * 500,
    "null": ["a", None],
    "few": ["a", "b"] * 20,
    "alike": ["Sci/Tech", "sci tech"] * 9,
}
"""The labels of the records in each file of the folder that is divided."""
UNIFORM = {"by": "label", "held_out": "uniform"}
ED = {"anna": {"ed": 0.5, "Sports": 0.5}}
PLAIN = {"instructions": {"template": "plain"}}
TEXTS = {"instructions": {"template": "{{ text }}"}}
TINY = {"fractions": {"validation": 0.01}}
FEW = r"alpha 1\.0 never gave each of 5 clients at least 10 of the 40 records"
HUB = r"some/news is neither a file or folder under .* on the hub \(no network\); set data_root"
PARTS = r"divide: 108 records are too few for 90 equal parts; .* or lower divide\.clients"
ALL, NONE = "records.jsonl", {"mixtures": ED, "by": "mixtures"}
DIVISIONS = [
    (ALL, {"label": "topic"}, "divide: line 1 of .* no field topic; .* label, text"),
    (ALL, {"label": "topic", "data": PLAIN}, r"line 1 of .*records\.jsonl has no field topic"),
    (ALL, {"data": {"text": "txt"}}, r"no field txt \(did you mean text\?"),
    (ALL, UNIFORM | {"data": TINY}, "takes 0 records with the label Business for the valid"),
    ("uneven.jsonl", UNIFORM, "13 records with the label b for the valid.* fewer than all 20 in t"),
    ("single.jsonl", {"by": "mixture", "share": 0.5}, "two labels, but there is only one"),
    ("null.jsonl", {}, "line 2 of .* field label contains None, not a label"),
    ("empty.jsonl", {}, r"empty\.jsonl has no records that contain text"),
    ("folder", {}, r"notes\.txt is plain text without labels"),
    ("folder/notes.txt", {"data": TEXTS}, "plain text without labels"),
    (
        {"ann": "folder/notes.txt"},
        {"data": TEXTS},
        r"piece 1 of .*s\.txt has no field output; its fi",
    ),
    ("few.jsonl", DIRICHLET | {"clients": 5, "alpha": 1}, FEW),
    ("alike.jsonl", {}, "'Sci/Tech' and 'sci tech' both give the client name sci-tech"),
    ("some/news", {}, HUB),
    ("gone.jsonl", {}, "is neither a file or folder under"),
    ("./gone", {}, "is neither a file or folder under"),
    ("/gone/away", {}, "is neither a file or folder under"),
    (
        ALL,
        NONE,
        r"client anna requests the label 'ed', .* \(labels: Business, .*, World\); correct",
    ),
    ({"a": ALL, "b": "blank.jsonl"}, NONE, r"blank\.jsonl has no records that contain text"),
    (ALL, EVEN | {"clients": 89, "public": True}, PARTS),
    (ALL, EVEN | {"data": {"fractions": {"test": 0.009}}}, "are too few for 4 equal parts"),
    (ALL, {"where": "outptu | wordcount > 3"}, r"no field outptu \(did you mean output"),
    (ALL, {"where": "output >"}, "divide.where is not a valid Jinja expression"),
    (ALL, {"where": "output > 3"}, "divide.where cannot be evaluated for .*not supported"),
    (ALL, {"where": "label == 'none'"}, "no records that contain text.*divide.where"),
    (ALL, {"where": "false", "data": PLAIN}, r"no train record satisfies divide\.where; correct"),
    *((f"label-{n}.jsonl", {}, "line 1 of") for n in range(4)),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with files of records, and with others that cannot be divided."""
    folder = tmp_path_factory.mktemp("refused")
    for name, labels in RECORDS.items():
        rows = [{"label": k, "text": f"{k} {n}", "output": "x"} for n, k in enumerate(labels)]
        write(folder / f"{name}.jsonl", *(row | {"instruction": "So?"} for row in rows))
    write(folder / "empty.jsonl", {"label": "a", "text": ""})
    write(folder / "blank.jsonl", {"text": " "})
    (folder / "folder").mkdir()
    (folder / "folder" / "notes.txt").write_text("text")
    for number, label in enumerate(('" "', "true", '"\\ud800"', "NaN")):
        (folder / f"label-{number}.jsonl").write_text(f'{{"text": "words", "label": {label}}}')
    return folder


@pytest.mark.parametrize(("source", "options", "sentence"), DIVISIONS)
def test_a_division_that_cannot_be_is_refused(source, options, sentence, root, monkeypatch) -> None:
    def load(name: str, *_: object, split: str) -> None:
        if name != "some/news":
            pytest.fail("the hub must not be asked for a path")
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    values = {**LABEL, **options}
    data = DataSpec.model_validate(values.pop("data", {}))
    with pytest.raises(CoterieError, match=sentence):
        divide(root, data, source=source, **values)


def test_messages_and_preferences_are_on_or_off() -> None:
    for kind, section in (("messages", MessagesSpec()), ("preferences", PreferenceSpec())):
        for value, wanted in ((True, section), ({}, section), (False, None)):
            assert getattr(DataSpec.model_validate({kind: value}), kind) == wanted
    assert DataSpec(messages=MessagesSpec(), limits=Limits(train=1)).limits.train == 1


def test_numbers_are_labels_too_and_shares_may_be_a_millionth_off() -> None:
    mixtures = {"anna": {1: 0.3, 2: 0.7 - 5e-7}}
    values = {"source": {1: "a", 2: "b"}, "by": "mixtures", "mixtures": mixtures}
    spec = DivideSpec.model_validate(values)
    assert list(spec.source) == ["1", "2"]
    assert spec.mixtures == {"anna": {"1": 0.3, "2": 0.7 - 5e-7}}

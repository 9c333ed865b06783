"""Templates: the shipped ones exactly, a user's own, and what is said of those that cannot be."""

from pathlib import Path

import pytest

from coterie.config.descriptions import descriptions
from coterie.data.spec import InstructionSpec
from coterie.data.templates import SHIPPED, inlined, render
from coterie.errors import CoterieError

BUILT_IN = r"built-in template \(alpaca, chat, plain, snli\)"
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further"
    " context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "Überlege\nwohl.\n\n### Input:\n你好 👩‍👩‍👧\n\n### Response:"
)
WITHOUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\nÜberlege\nwohl.\n\n### Response:"
)
WET = 'Suppose It <rains>. Can we infer that "It\'s {wet}."? Yes, No, or Maybe?'
TASK = "Überlege\nwohl."


PROMPTS = [
    ("alpaca", {"instruction": TASK, "input": "你好 👩‍👩‍👧", "output": "x"}, WITH_INPUT),
    ("alpaca", {"instruction": TASK}, WITHOUT),
    ("alpaca", {"instruction": TASK, "input": ""}, WITHOUT),
    ("alpaca", {"instruction": TASK, "input": None}, WITHOUT),
    ("plain", {"instruction": "Wer?", "input": "a\nb"}, "Wer?\na\nb\nAnswer:"),
    ("plain", {"instruction": "Wer?"}, "Wer?\nAnswer:"),
    ("snli", {"premise": "It <rains>.", "hypothesis": "It's {wet}."}, WET),
    ("{{ q }} ", {"q": "{{ x }}"}, "{{ x }} "),
    ("{% for w in words %}{{ w }}\n{% endfor %}!", {"words": ["a", 1]}, "a\n1\n!"),
    ("Q {{ text | trim }}\n\n", {"text": " a\n"}, "Q a\n\n"),
]


@pytest.mark.parametrize(("template", "fields", "prompt"), PROMPTS)
def test_a_prompt_is_exactly_what_the_template_says(template, fields, prompt) -> None:
    assert render(template, fields, "line 3") == prompt
    assert render(inlined(template, Path("nowhere")), fields, "line 3") == prompt


def test_the_run_file_s_key_names_the_shipped_templates() -> None:
    described = descriptions(InstructionSpec)["template"]
    assert all(name in described for name in SHIPPED)
    assert list(SHIPPED) == ["alpaca", "chat", "plain", "snli"]


def test_a_path_becomes_the_file_s_text(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_bytes("\ufeff{{ q }}?\n\nAntwort für 你:\n".encode())
    text = "{{ q }}?\n\nAntwort für 你:"
    assert inlined("own.jinja", tmp_path) == text
    assert inlined(str(tmp_path / "own.jinja"), Path("elsewhere")) == text
    (tmp_path / "alpaca").write_text("{{ mine }}")
    for kept in ("alpaca", "snli", "{{ q }}\n", "{% if q %}x{% endif %}"):
        assert inlined(kept, tmp_path) == kept


UNUSABLE_TEMPLATES = [
    ("alpacca", rf"there is no file .*alpacca; .* {BUILT_IN}"),
    ("gone.jinja", r"there is no file .*gone\.jinja; correct the path, use a built-in"),
    ("x" * 5000 + ".jinja", r"there is no file .*x\.jinja; correct the path, use a built-in"),
    ("none.jinja", r"The template .*none\.jinja uses no field; insert one"),
    ("latin.jinja", r"latin\.jinja is not UTF-8"),
    ("bad.jinja", r"Line 2 of the template is not valid Jinja: .*; fix that line"),
    ("a\n\n{{ b", r"Line 3 of the template is not valid Jinja: unexpected end of template"),
    ("{{ a | shout }}", r"Line 1 .*: No filter named 'shout'"),
    ("{% if a %}\n", r"Line 1 .*: Unexpected end of template"),
]


@pytest.mark.parametrize(("template", "sentence"), UNUSABLE_TEMPLATES)
def test_a_template_that_cannot_be_used_is_named(tmp_path, template, sentence) -> None:
    (tmp_path / "none.jinja").write_text("What is it?")
    (tmp_path / "latin.jinja").write_bytes("{{ é }}".encode("latin-1"))
    (tmp_path / "bad.jinja").write_text("{{ a }}\n{% fi %}")
    with pytest.raises(CoterieError, match=sentence):
        inlined(template, tmp_path)


UNFIT_RECORDS = [
    ("alpaca", {"input": "x"}, r"has no field instruction .*; its fields are: input\. Correct"),
    ("alpaca", {"instruction": None, "a": 1}, "has null in the field instruction"),
    ("snli", {"premises": "x"}, r"no field premise \(did you mean premises\?\)"),
    ("{{ b }}{{ a }}", {"b": "x"}, "has no field a; its fields are: b"),
    ("{{ a.b }}", {"a": {"c": 1}}, "does not fit the template .*no attribute 'b'"),
    ("{{ a + 1 }}", {"a": "x"}, "does not fit the template"),
    ("{{ a.__class__ }}", {"a": "x"}, r"does not fit .* '__class__' .* is unsafe"),
    ("{{ a.append(1) }}", {"a": [1]}, r"does not fit .*not safe|does not fit .*unsafe"),
    ("{{ a }}\n ", {"a": " "}, "gives an empty text; fix the record or the template"),
    ("{{ a }}", {"a": "ab\ud83d"}, "half a character"),
    ("own.jinja", {"a": "x"}, rf"no template 'own\.jinja'; use a {BUILT_IN}"),
]


@pytest.mark.parametrize(("template", "fields", "sentence"), UNFIT_RECORDS)
def test_a_record_that_does_not_fit_is_named(template, fields, sentence) -> None:
    start = "" if template == "own.jinja" else "line 3 of x.jsonl "
    with pytest.raises(CoterieError, match=f"^{start}.*{sentence}"):
        render(template, fields, "line 3 of x.jsonl")

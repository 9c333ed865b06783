"""Templates that anybody may have written are refused before they compute for ever."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_templates import CHEAP, COSTLY, FORBIDDEN
from transformers.utils import chat_template_utils

from coterie.bases import load_tokenizer
from coterie.data import sandbox
from coterie.data.chat_sandbox import rendered, sandboxed
from coterie.data.files import Record
from coterie.data.sandbox import TooCostly
from coterie.data.templates import holds
from coterie.errors import CoterieError

MESSAGES = [{"role": "user", "content": "hello"}]
PROGRAM = """
import json, sys
from pathlib import Path
from hostile_templates import COSTLY, FORBIDDEN
from coterie.bases import load_tokenizer
from coterie.data import sandbox
from coterie.data.chat import ChatTemplate
from coterie.data.templates import inlined, render
from coterie.errors import CoterieError

def refusal(work):
    try:
        return f"rendered {work()!r:.50}"
    except CoterieError as error:
        return str(error)

sandbox.MAX_STEPS, sandbox.MAX_TOTAL = 200_000, 5  # lower than the defaults, to save time
tokenizer = load_tokenizer("tiny-gpt2")
for name, source in (COSTLY | FORBIDDEN).items():
    chat = refusal(lambda: ChatTemplate(tokenizer, source, "a base's"))
    text = source.replace("messages", "text").replace("strftime_now", "text.strip")
    prompt = refusal(lambda: render(inlined(text, Path()), {"text": "a"}, "Record 1"))
    print(json.dumps([name, chat, prompt]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[str, str]]:
    """The errors for all hostile templates, from a process that can be ended."""
    process = [sys.executable, "-c", PROGRAM]
    folder = Path(__file__).parent
    run = subprocess.run(process, capture_output=True, text=True, timeout=300, cwd=folder)
    lines = map(json.loads, run.stdout.splitlines())
    return {name: (chat, prompt) for name, chat, prompt in lines}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_template_is_refused(name, refusals) -> None:
    limits = r"makes (a value|values) of more|computes a number|needs more|is nested|has 200,007"
    chat, prompt = refusals[name]
    assert re.match(rf"The chat template \(a base's\) ({limits}).* to another template\.$", chat)
    assert re.search(rf"[tT]he template ({limits}).*; write a simpler template\.$", prompt)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_attribute_or_filter_is_refused(name, refusals) -> None:
    for error in refusals[name]:
        assert re.search(r"[tT]he (chat )?template|has no field", error)


@pytest.mark.parametrize("source", CHEAP)
def test_other_templates_mean_what_they_mean_in_transformers(source) -> None:
    text = chat_template_utils._compile_jinja_template(source).render(messages=MESSAGES)
    assert rendered(source, {"messages": MESSAGES}) == text == CHEAP[source]


def test_a_slow_template_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    source = "{% set l = range(90000)|list %}{% for a in l %}{% set y = -1 in l %}{% endfor %}"
    with pytest.raises(TooCostly, match=r"needs more than 0\.2 seconds"):
        rendered(source, {})


def test_the_limits_grow_with_what_a_template_is_given(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SIZE", 10)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10)
    source = "{% for m in messages %}{{ m.content }}{{ m.content ~ m.content }}{% endfor %}"
    messages = [{"content": "a" * 1000}] * 100
    assert rendered(source, {"messages": messages}) == "a" * 300_000
    with pytest.raises(TooCostly, match="steps"):
        rendered("{% for a in range(99) %}{% endfor %}", {})


def test_a_costly_expression_is_refused() -> None:
    record = Record("Record 1", {"text": "a"})
    with pytest.raises(CoterieError, match=r"divide.where computes a number of more than"):
        holds("text and 9**(9**9)", record)
    with pytest.raises(CoterieError, match=r"divide.where has 1"):
        holds("1 " * 60_000, record)
    assert holds("text|length == 1", record)


def test_other_packages_render_in_the_sandbox() -> None:
    tokenizer = load_tokenizer("tiny-gpt2")
    tokenizer.chat_template = "{% if messages|length > 1 %}{{ 9**(9**9) }}{% endif %}ok"
    original = chat_template_utils._compile_jinja_template
    with sandboxed():
        assert tokenizer.apply_chat_template(MESSAGES, tokenize=False) == "ok"
        with pytest.raises(TooCostly):
            tokenizer.apply_chat_template(MESSAGES * 2, tokenize=False)
    assert chat_template_utils._compile_jinja_template is original

"""Answers of the assistant in conversations that published chat templates render."""

import random
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from talks import NAMES, TEMPLATES, Exchange, Talk, needs_templates, talk

from coterie.bases import load_tokenizer
from coterie.data.chat import TODAY, ChatTemplate
from coterie.data.items import Conversation, Turn
from coterie.errors import CoterieError

END = "<|endoftext|>"
"""The end-of-text token of these tests' tokenizer."""
MARKERS = {
    **{"cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "deepseekv3": "<｜end▁of▁sentence｜>"},
    **dict.fromkeys(("gemma", "gemma3"), "<end_of_turn>"),
    **{"glm4moe": "<|user|>", "granite_3.0_instruct": "<|end_of_text|>"},
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(("gptoss", "phi3", "phi3_5"), "<|end|>"),
    **{"llama_2_chat": f" {END}", "mistral": END, "zephyr": END},
}
"""The marker after an answer, by template; the other templates write <|im_end|>."""
LAST_MARKERS = {"glm4moe": END, "gptoss": "<|return|>"}
"""The marker after the last answer, if it is a different one."""


@cache
def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(load_tokenizer("tiny-gpt2"), source, name)


def plain(name: str, given: Talk) -> str:
    """Return a conversation as transformers renders it."""
    chat = template(name)
    messages: Any = [turn._asdict() for turn in given.turns()]
    options: Any = {"chat_template": chat.source, "tokenize": False}
    text: Any = chat.tokenizer.apply_chat_template(messages, **options)
    for form in ("%d %b %Y", "%Y-%m-%d"):
        text = text.replace(datetime.now().strftime(form), TODAY.strftime(form))
    return text


def without_space(text: str) -> str:
    return "".join(text.split())


@needs_templates
def test_all_templates_are_listed() -> None:
    assert sorted(path.stem for path in TEMPLATES.glob("*.jinja")) == NAMES


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_what_the_assistant_said_counts_and_nothing_else(name: str) -> None:
    draw = random.Random(name)
    for _ in range(25):
        given = talk(draw, system=name != "gemma")
        words, text = plain(name, given.in_words()), plain(name, given)
        parts = template(name).rendered(given.conversation()).parts
        whole = "".join(part for part, _ in parts)
        assert text.startswith(whole.removesuffix(END) if name == "glm4moe" else whole)
        assert [counts for _, counts in parts] == [False, True] * len(given.exchanges)
        rest = words
        for n, (exchange, (before, _), (answer, _)) in enumerate(
            zip(given.exchanges, parts[::2], parts[1::2], strict=True)
        ):
            gap, rest = rest.split(f"SAID{n}SAID")  # each is there once
            if n:
                gap = gap.removeprefix(MARKERS.get(name, "<|im_end|>"))
            thought = f"THINK{n}THINK" in gap
            if thought:
                gap, _, _ = gap.rpartition("<think>")
            gap = gap.replace(f"USER{n}USER", exchange.user).replace("ADVICE", given.system or "")
            assert without_space(before) == without_space(gap)
            marker = MARKERS.get(name, "<|im_end|>")
            if n == len(given.exchanges) - 1:
                marker = LAST_MARKERS.get(name, marker)
            check_answer(answer, exchange, thought, marker)


def check_answer(part: str, exchange: Exchange, thought: bool, marker: str) -> None:
    """Check that a part consists of the thoughts, the answer and a marker."""
    assert part.endswith(marker)
    body = part.removesuffix(marker).strip()
    if thought:
        assert exchange.thinking is not None
        thinking, tag, body = body.removeprefix("<think>").partition("</think>")
        assert tag
        assert thinking.strip() == exchange.thinking.strip()
    assert body.strip() == exchange.answer.strip()


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_what_opens_an_answer_is_what_comes_before_it(name: str) -> None:
    draw = random.Random(f"opening {name}")
    chat = template(name)
    for _ in range(10):
        given = talk(draw, system=name != "gemma")
        parts = chat.rendered(given.conversation()).parts
        *before, _ = given.turns()
        thinks = "<think>" in parts[-1][0]
        opening = chat.opening_and_answer(before, thinking=thinks)[:-1]
        if name == "deepseekv3" and given.exchanges[-1].thinking is not None:
            continue  # it leaves the thinking out, and the space after it in
        assert opening == [part for part, _ in parts[:-1]]
        lead, marker = chat.around
        if not thinks:
            answer = parts[-1][0]
            assert answer.startswith(lead)
            assert without_space(answer) == without_space(given.exchanges[-1].answer + marker)


@needs_templates
def test_bytes_are_those_of_what_is_said() -> None:
    exchanges = [Exchange("hi", None, "é 漢"), Exchange("and?", "hm", "no")]
    item = Talk("Be short.", exchanges).conversation()
    for name, text in (("llama3", "é 漢<think>hm</think>no"), ("deepseekv3", "é 漢no")):
        assert template(name).rendered(item).bytes == len(text.encode())


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_tags_and_marks_in_an_answer_are_right_or_refused(name: str) -> None:
    for answer in ("a </think> b", "<think> a", "a <think>b</think> c", "<|channel|>", "U\ue001"):
        given = Talk(None, [Exchange("u", None, answer), Exchange("v", None, "w")])
        with suppress(CoterieError):
            parts = template(name).rendered(given.conversation()).parts
            assert parts[1][0].removesuffix(MARKERS.get(name, "<|im_end|>")).strip() == answer


SYSTEM, USER, ANSWER = Turn("system", "s"), Turn("user", "u"), Turn("assistant", "a")
REFUSED = r"^line 3: the chat template \({}\) refuses the conversation {}"


@needs_templates
@pytest.mark.parametrize(("name", "reason"), [("gemma", r"\(System role not"), ("mistral", "")])
def test_what_a_template_refuses_is_a_sentence(name, reason) -> None:
    turns = (SYSTEM if name == "gemma" else USER, USER, ANSWER)
    with pytest.raises(CoterieError, match=REFUSED.format(name, reason)):
        template(name).rendered(Conversation(turns, "line 3"))


EACH = "{% for m in messages %}X{{ eos_token }}{% endfor %}"
CHANGES = "omits, repeats or changes an answer"
TRIAL = r"^A trial conversation: the chat template \(mine\) refuses the conversation"


NOT_LEARNABLE = [
    ("{% for m in messages %}", r"^Line 1 of the chat template \(mine\) is not valid Jinja: "),
    ("{{ messages[0].content }}{{ eos_token }}", CHANGES),
    (EACH.replace("X", "{{ m.content * 2 }}"), CHANGES),
    (EACH.replace("X", "{{ m.content | upper }}"), CHANGES),
    (EACH.replace("X{{ eos_token }}", "{{ m.content }}\n"), "writes no marker after an answer"),
    ("{{ messages.x.y }}", TRIAL),
]


@pytest.mark.parametrize(("source", "sentence"), NOT_LEARNABLE)
def test_a_template_that_cannot_be_learned_with_is_refused(source, sentence) -> None:
    with pytest.raises(CoterieError, match=sentence):
        ChatTemplate(load_tokenizer("tiny-gpt2"), source, "mine")


UNCLEAR = [
    ("{{ m.content | title }}", "u", r"^The conversation: .* changes an answer of the assistant"),
    ("{{ m.content }}", "\ue000", r"contains the character U\+E000"),
]


@pytest.mark.parametrize(("text", "user", "sentence"), UNCLEAR)
def test_a_conversation_whose_answer_is_not_clear_is_refused(text, user, sentence) -> None:
    chat = ChatTemplate(load_tokenizer("tiny-gpt2"), EACH.replace("X", text), "mine")
    with pytest.raises(CoterieError, match=sentence):
        chat.rendered(Talk(None, [Exchange(user, None, "small")]).conversation())


TABLE = Path(__file__).parents[2] / "docs" / "use" / "conversations.md"
MODELS = [
    *("Aya, Command R7B", "DeepSeek-V3", "Gemma, Gemma 2", "Gemma 3", "GLM-4.5", "gpt-oss"),
    *("Granite 3.0", "LFM2", "LFM2.5", "Llama 3", "Llama 3.1", "Llama 3.2", "Llama 2"),
    *("Mistral 7B", "Phi-3", "Phi-3.5", "Qwen2.5", "Qwen3", "Qwen3.5, small", "Qwen3.5"),
    *("Qwen3.6", "Qwen3 Instruct 2507", "Zephyr"),
]
"""The first column of the table, for each of NAMES."""


@needs_templates
def test_the_table_of_templates_is_right() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    table = {row[0].strip(): row[1:] for row in rows if len(row) == 5}
    for name, model in zip(NAMES, MODELS, strict=True):
        exchanges = [Exchange(f"u{n}", f"THINK{n}", f"SAID{n}") for n in range(3)]
        text = plain(name, Talk(None, exchanges))
        kept = [f"THINK{n}" in text for n in range(3)]
        thinking = {(True,) * 3: "kept", (False,) * 3: "dropped", (False, False, True): "last"}
        try:
            system = "yes" if "ADVICE" in plain(name, Talk("ADVICE", exchanges)) else "dropped"
        except Exception:
            system = "refused"
        shown = "`</s>`" if MARKERS.get(name, "").strip() == END else "`<|im_end|>`"
        if name in MARKERS and shown != "`</s>`":
            shown = f"`{MARKERS[name]}`"
        *columns, remarks = table[model]
        assert columns == [system, thinking[tuple(kept)], shown.replace("|", "\\|")]
        alternate = nullcontext()
        if "turns must alternate" in remarks:
            alternate = pytest.raises(CoterieError, match="refuses the conversation")
        with alternate:
            template(name).rendered(Conversation((USER, USER, ANSWER)))


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_empty_thinking_counts_where_the_template_leaves_it_in(name: str) -> None:
    # Templates that write an empty block themselves write it before any answer.
    text = "<think>\n\n</think>\n\nIt is."
    chat = template(name)
    turns = (Turn("user", "Is it?"), Turn("assistant", text))
    _, (answer, counts) = chat.rendered(Conversation(turns)).parts
    lead, marker = chat.around
    kept = answer.removeprefix(lead).removesuffix(marker).strip()
    assert counts
    assert kept in (text, "It is.")
    opening = "".join(chat.opening_and_answer([Turn("user", "Is it?")])[:-1])
    assert (kept == text) == ("<think>" not in opening and name != "deepseekv3")


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on_whatever_a_model_said_before(name: str) -> None:
    chat = template(name)
    for answer in ("foo</think>bar", "x <think>y</think> z", "It is."):
        turns = [Turn("user", "Is it?"), Turn("assistant", answer), Turn("user", "Why?")]
        for thinking in (False, True):
            opening = "".join(chat.opening_and_answer(turns, thinking)[:-1])
            assert "\ue000" not in opening
            assert opening.rindex("Why?") > opening.rindex("Is it?")

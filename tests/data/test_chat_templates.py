"""What the assistant said is found in what published chat templates make of conversations."""

import random
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from talks import NAMES, TEMPLATES, Said, Talk, needs_templates, talk

from coterie.bases import load_tokenizer
from coterie.data.chat import TODAY, ChatTemplate
from coterie.data.items import Conversation, Turn
from coterie.errors import CoterieError

END = "<|endoftext|>"
"""What ends a text in the vocabulary of these tests."""
MARKERS = {
    "cohere2": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "glm4moe": "<|user|>",
    "gptoss": "<|end|>",
    "granite_3.0_instruct": "<|end_of_text|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "llama_2_chat": f" {END}",
    "mistral": END,
    "phi3": "<|end|>",
    "phi3_5": "<|end|>",
    "zephyr": END,
}
"""What ends an answer; elsewhere it is <|im_end|>."""
LAST_MARKERS = {"glm4moe": END, "gptoss": "<|return|>"}
"""What ends the last answer, where that is another."""


@cache
def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(load_tokenizer("tiny-gpt2"), source, name)


def plain(name: str, given: Talk) -> str:
    """What transformers makes of a conversation."""
    chat = template(name)
    messages: list[Any] = [turn._asdict() for turn in given.turns()]
    text: Any = chat.tokenizer.apply_chat_template(
        messages, chat_template=chat.source, tokenize=False
    )
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
        assert [said for _, said in parts] == [False, True] * len(given.said)
        rest = words
        for n, (said, (before, _), (answer, _)) in enumerate(
            zip(given.said, parts[::2], parts[1::2], strict=True)
        ):
            gap, rest = rest.split(f"SAID{n}SAID")  # each is there once
            if n:
                gap = gap.removeprefix(MARKERS.get(name, "<|im_end|>"))
            thought = f"THINK{n}THINK" in gap
            if thought:
                gap, _, _ = gap.rpartition("<think>")
            gap = gap.replace(f"USER{n}USER", said.user).replace("ADVICE", given.system or "")
            assert without_space(before) == without_space(gap)
            last = n == len(given.said) - 1
            marker = MARKERS.get(name, "<|im_end|>")
            check_answer(answer, said, thought, LAST_MARKERS.get(name, marker) if last else marker)


def check_answer(part: str, said: Said, thought: bool, marker: str) -> None:
    """A part is an answer, with what the assistant thought before it, and a marker after it."""
    assert part.endswith(marker)
    body = part.removesuffix(marker).strip()
    if thought:
        assert said.thinking is not None
        thinking, found, body = body.removeprefix("<think>").partition("</think>")
        assert found
        assert thinking.strip() == said.thinking.strip()
    assert body.strip() == said.answer.strip()


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
        if name == "deepseekv3" and given.said[-1].thinking is not None:
            continue  # it leaves the thinking out, and the space after it in
        assert opening == [part for part, _ in parts[:-1]]
        lead, marker = chat.around
        if not thinks:
            said = parts[-1][0]
            assert said.startswith(lead)
            assert without_space(said) == without_space(given.said[-1].answer + marker)


@needs_templates
def test_bytes_are_those_of_what_is_said() -> None:
    given = Talk("Be short.", [Said("hi", None, "é 漢"), Said("and?", "hm", "no")])
    assert template("llama3").rendered(given.conversation()).bytes == len(
        "é 漢<think>hm</think>no".encode()
    )
    assert template("deepseekv3").rendered(given.conversation()).bytes == len("é 漢no".encode())


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_tags_and_marks_in_an_answer_are_right_or_refused(name: str) -> None:
    """Some templates cut an answer where it has </think> inside; then it cannot be learned."""
    for answer in ("a </think> b", "<think> a", "a <think>b</think> c", "<|channel|>", "U\ue001"):
        given = Talk(None, [Said("u", None, answer), Said("v", None, "w")])
        with suppress(CoterieError):
            parts = template(name).rendered(given.conversation()).parts
            assert parts[1][0].removesuffix(MARKERS.get(name, "<|im_end|>")).strip() == answer


@needs_templates
def test_what_a_template_refuses_is_a_sentence() -> None:
    system = Conversation(
        (Turn("system", "s"), Turn("user", "u"), Turn("assistant", "a")), "line 3"
    )
    with pytest.raises(
        CoterieError,
        match=r"^line 3: the chat template \(gemma\) refuses the conversation \(System role not",
    ):
        template("gemma").rendered(system)
    twice = Conversation((Turn("user", "u"), Turn("user", "v"), Turn("assistant", "a")), "line 4")
    with pytest.raises(
        CoterieError, match=r"^line 4: the chat template \(mistral\) refuses the conversation"
    ):
        template("mistral").rendered(twice)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for m in messages %}", r"^Line 1 of the chat template \(mine\) is not valid Jinja: "),
        (
            "{{ messages[0].content }}{{ eos_token }}",
            "omits, repeats or changes an answer",
        ),
        (
            "{% for m in messages %}{{ m.content * 2 }}{{ eos_token }}{% endfor %}",
            "omits, repeats or changes",
        ),
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            "writes no marker after an answer",
        ),
        (
            "{{ messages.x.y }}",
            r"^A trial conversation: the chat template \(mine\) refuses the conversation",
        ),
    ],
)
def test_a_template_that_cannot_be_learned_with_is_refused(source: str, sentence: str) -> None:
    with pytest.raises(CoterieError, match=sentence):
        ChatTemplate(load_tokenizer("tiny-gpt2"), source, "mine")


def test_a_template_that_changes_answers_is_refused() -> None:
    source = "{% for m in messages %}{{ m.content | upper }}{{ eos_token }}{% endfor %}"
    shouting = ChatTemplate(load_tokenizer("tiny-gpt2"), source.replace("upper", "title"), "mine")
    with pytest.raises(
        CoterieError, match=r"^The conversation: .* changes an answer of the assistant"
    ):
        shouting.rendered(Talk(None, [Said("u", None, "small")]).conversation())
    with pytest.raises(CoterieError, match="omits, repeats or changes an answer"):
        ChatTemplate(load_tokenizer("tiny-gpt2"), source, "mine")
    chat = ChatTemplate(load_tokenizer("tiny-gpt2"), source.replace(" | upper", ""), "mine")
    with pytest.raises(CoterieError, match=r"contains the character U\+E000"):
        chat.rendered(Talk(None, [Said("\ue000", None, "small")]).conversation())


TABLE = Path(__file__).parents[2] / "docs" / "use" / "conversations.md"
MODELS = {
    "cohere2": "Aya, Command R7B",
    "deepseekv3": "DeepSeek-V3",
    "gemma": "Gemma, Gemma 2",
    "gemma3": "Gemma 3",
    "glm4moe": "GLM-4.5",
    "gptoss": "gpt-oss",
    "granite_3.0_instruct": "Granite 3.0",
    "lfm2": "LFM2",
    "lfm2_2_5": "LFM2.5",
    "llama3": "Llama 3",
    "llama3_1": "Llama 3.1",
    "llama3_2": "Llama 3.2",
    "llama_2_chat": "Llama 2",
    "mistral": "Mistral 7B",
    "phi3": "Phi-3",
    "phi3_5": "Phi-3.5",
    "qwen2_5": "Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_5_nothink": "Qwen3.5, small",
    "qwen3_5_think": "Qwen3.5",
    "qwen3_6": "Qwen3.6",
    "qwen3_instruct_2507": "Qwen3 Instruct 2507",
    "zephyr": "Zephyr",
}


@needs_templates
def test_the_table_of_templates_is_right() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    table = {row[0].strip(): row[1:] for row in rows if len(row) == 5}
    for name in NAMES:
        said = [Said(f"u{n}", f"THINK{n}", f"SAID{n}") for n in range(3)]
        text = plain(name, Talk(None, said))
        kept = [f"THINK{n}" in text for n in range(3)]
        thinking = {(True,) * 3: "kept", (False,) * 3: "dropped", (False, False, True): "last"}
        try:
            system = "yes" if "ADVICE" in plain(name, Talk("ADVICE", said)) else "dropped"
        except Exception:
            system = "refused"
        shown = "`</s>`" if MARKERS.get(name, "").strip() == END else "`<|im_end|>`"
        if name in MARKERS and shown != "`</s>`":
            shown = f"`{MARKERS[name]}`"
        *told, remarks = table[MODELS[name]]
        assert told == [system, thinking[tuple(kept)], shown.replace("|", "\\|")]
        turns = (Turn("user", "u"), Turn("user", "v"), Turn("assistant", "a"))
        alternate = nullcontext()
        if "turns must alternate" in remarks:
            alternate = pytest.raises(CoterieError, match="refuses the conversation")
        with alternate:
            template(name).rendered(Conversation(turns))


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_empty_thinking_counts_where_the_template_leaves_it_in(name: str) -> None:
    """Templates that write an empty block themselves would write it for any answer."""
    said = "<think>\n\n</think>\n\nIt is."
    chat = template(name)
    _, (answer, counts) = chat.rendered(
        Conversation((Turn("user", "Is it?"), Turn("assistant", said)))
    ).parts
    lead, marker = chat.around
    kept = answer.removeprefix(lead).removesuffix(marker).strip()
    assert counts
    assert kept in (said, "It is.")
    opening = "".join(chat.opening_and_answer([Turn("user", "Is it?")])[:-1])
    assert (kept == said) == ("<think>" not in opening and name != "deepseekv3")


@needs_templates
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_goes_on_whatever_a_model_said_before(name: str) -> None:
    chat = template(name)
    for said in ("foo</think>bar", "x <think>y</think> z", "It is."):
        turns = [Turn("user", "Is it?"), Turn("assistant", said), Turn("user", "Why?")]
        for thinking in (False, True):
            opening = "".join(chat.opening_and_answer(turns, thinking)[:-1])
            assert "\ue000" not in opening
            assert opening.rindex("Why?") > opening.rindex("Is it?")

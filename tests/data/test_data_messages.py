"""Records as conversations: what is read, what is left out, and what is refused."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from questions import records, rows, write
from transformers import PreTrainedTokenizerBase

from coterie.config.run import parse
from coterie.data.division.divide import divided_texts
from coterie.data.division.spec import DivideSpec
from coterie.data.items import Conversation, Turn
from coterie.data.kinds.conversations import conversations
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import ClientSpec, DataSpec, InstructionSpec, Limits, MessagesSpec
from coterie.data.texts import Texts, client_texts
from coterie.data.tokens import tokenise
from coterie.errors import CoterieError
from coterie.evaluation.quality import quality, without_held_out
from coterie.evaluation.survey import Survey

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}


def said(user: Any = HI, assistant: Any = HELLO) -> list[Any]:
    return [user, assistant]


def read(*fields: dict[str, Any], field: str | None = None) -> list[tuple[Turn, ...]]:
    return [item.turns for item in conversations(records(*fields), MessagesSpec(field=field))]


def test_both_forms_are_the_same_conversation() -> None:
    wanted = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello!"))
    openai = [{"role": "system", "content": "Be brief."}, HI, HELLO]
    sharegpt = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello!"},
    ]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    several = [*openai[:2], {"role": "assistant", "content": parts}]
    given = ({"messages": openai}, {"conversations": sharegpt}, {"messages": several})
    assert read(*given) == [wanted] * 3
    assert read({"talk": openai, "messages": 1}, field="talk") == [wanted]
    both = {"messages": None, "conversations": sharegpt, "tools": [], "id": 7}
    assert read(both) == [wanted]  # as Parquet has what is not there


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert read({"messages": [*said(), HI, HI]}) == [
        (Turn("user", "Hi"), Turn("assistant", "Hello!"))
    ]


def test_keys_that_hold_nothing_are_passed_over() -> None:
    empty = {"tool_calls": None, "name": "", "images": [], "function_call": {}}
    assert read({"messages": said(HI | empty, HELLO | empty)}) == read({"messages": said()})


def test_thinking_stays_in_the_answer_and_is_not_what_is_compared() -> None:
    thought = "<think>\nhm\n</think>\n\nHello!"
    [found] = conversations(
        records({"messages": said(HI, {"role": "assistant", "content": thought})}), MessagesSpec()
    )
    assert found.turns[-1].content == thought
    assert found.answer == "Hello!"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"text": "Hi"}, " has no field messages; its fields are: text"),
        ({"messages": "Hi"}, ": field messages contains 'Hi', not a list of turns; fix"),
        ({"messages": []}, r": field messages is an empty list"),
        ({"messages": [HI]}, ": the conversation has no turn of the assistant; add an answer"),
        ({"messages": ["Hi"]}, ": turn 1 is 'Hi', not a mapping like "),
        ({"messages": said({"content": "Hi"})}, ": turn 1 has no role"),
        (
            {"messages": said({"role": "bot", "content": "Hi"})},
            ": turn 1 has 'bot' under the key role, but",
        ),
        (
            {"conversations": said({"from": "bard", "value": "Hi"})},
            ": turn 1 has 'bard' under the key from",
        ),
        ({"messages": said({"role": 1, "content": "Hi"})}, ": turn 1 has 1 under the key role"),
        ({"messages": said({"role": "user"})}, ": turn 1 is an empty turn of the user; correct"),
        ({"messages": said(HI | {"content": " \n"})}, ": turn 1 is an empty turn of the user"),
        ({"messages": said(HI | {"content": 3})}, ": turn 1 has 3, not text, in content; fix"),
        ({"messages": said(HI, HELLO | {"content": ""})}, ": turn 2 is an empty answer; correct"),
        (
            {"messages": said(HI, HELLO | {"content": "<think>hm</think> "})},
            ": turn 2 is an empty answer",
        ),
        (
            {"messages": [*said(), {"role": "system", "content": "s"}, *said()]},
            ": turn 3 is a system prompt; only the first turn can be a system prompt",
        ),
        (
            {"messages": [HI, HELLO | {"tool_calls": [{"id": 1}]}]},
            ": turn 2 has the key tool_calls: tool calls are not supported; remove the record",
        ),
        (
            {"messages": [*said(), {"role": "tool", "content": "4"}]},
            ": turn 3 has the role tool: tool calls",
        ),
        (
            {"conversations": [{"from": "observation", "value": "4"}]},
            ": turn 1 has the role observation: tool calls",
        ),
        ({"messages": said(), "tools": [{"name": "f"}]}, " has the field tools: tool calls"),
        (
            {"messages": said(), "system": "s"},
            ' has a system prompt in the field "system", not in the',
        ),
        (
            {"messages": said(HI, HELLO | {"reasoning_content": "hm"})},
            ": turn 2 has the key reasoning_content: move the thinking to the beginning of content",
        ),
        (
            {"conversations": [{"from": "gpt", "value": "Hello", "thinking": "hm"}]},
            ": turn 1 has the key thinking: move the thinking to the beginning of value",
        ),
        ({"messages": said(HI | {"weight": 0})}, ": turn 1 has the key weight: Coterie does not"),
        (
            {"messages": said(HI | {"content": [{"type": "image", "image": "x"}]})},
            ": turn 1 has a part of type 'image' in content; only text is supported",
        ),
        ({"messages": said(HI | {"content": ["Hi"]})}, ": turn 1 has a part of type 'str' in"),
        (
            {"messages": said(HI | {"content": [{"type": "text", "text": "Hi", "cache": 1}]})},
            ": turn 1 has the key cache in content; fix or remove it",
        ),
        ({"messages": said(HI | {"content": "\ud83d"})}, ": turn 1 contains half a character"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CoterieError, match=rf"^line 2 of x\.jsonl{sentence}"):
        read({"messages": said()}, fields)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"messages": True, "instructions": {}}, "data.instructions and data.messages are mutual"),
        ({"chat_template": "{{ messages }}"}, "data.chat_template has no effect without convers"),
        (
            {"chat_template": "{{ messages }}", "instructions": {"template": "plain"}},
            "data.chat_template has no effect",
        ),
        ({"messages": "conversations"}, "valid dictionary"),
    ],
)
def test_what_does_not_go_together_is_refused(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        DataSpec.model_validate(data)


def test_messages_are_on_or_off() -> None:
    assert DataSpec.model_validate({"messages": True}).messages == MessagesSpec()
    assert DataSpec.model_validate({"messages": {}}).messages == MessagesSpec()
    assert DataSpec.model_validate({"messages": False}).messages is None
    assert DataSpec(messages=MessagesSpec(), limits=Limits(train=1)).limits.train == 1


def test_a_template_s_file_is_read_with_the_run_file(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}\n"
    (tmp_path / "mine.jinja").write_text(text)
    (tmp_path / "notes.txt").write_text("no template")
    run = {"clients": [{"name": "anna", "path": "a.jsonl"}], "data_root": str(tmp_path)}

    def chat(template: str) -> str | None:
        data = {"messages": True, "chat_template": template}
        return parse({**run, "data": data}).data.chat_template

    assert chat("mine.jinja") == text
    assert chat(text) == text
    with pytest.raises(CoterieError, match=r"data\.chat_template: there is no file .*other\.jinja"):
        chat("other.jinja")
    with pytest.raises(CoterieError, match=r"notes\.txt is not a chat template, because it"):
        chat("notes.txt")
    told = {**run, "data": {"messages": True}}
    with pytest.raises(CoterieError, match="accuracy` needs answers to choose from"):
        parse({**told, "evaluation": {"metric": "accuracy"}})
    with pytest.raises(CoterieError, match=r"^`evaluation\.generate` needs answers; set"):
        parse({**run, "evaluation": {"generate": 3}})
    assert parse({**told, "evaluation": {"generate": 3}}).evaluation.generate == 3


def many(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": said({"role": "user", "content": f"case {n}"}), "label": "ab"[n % 2]}
        for n in range(count)
    ]


def test_clients_hold_whole_conversations(tmp_path: Path) -> None:
    write(tmp_path / "own.jsonl", *many(40))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(many(5)), tmp_path / "test.parquet")
    data = DataSpec(messages=MessagesSpec())
    spec = ClientSpec(name="anna", train="own.jsonl", test="test.parquet")
    texts = client_texts(spec, data, tmp_path, seed=1)
    assert [len(split) for split in vars(texts).values()] == [36, 4, 5]
    assert texts.test[0].turns == (Turn("user", "case 0"), Turn("assistant", "Hello!"))
    assert texts.test[0].where.startswith("Client anna: record 1 of ")
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(CoterieError, match=r"notes\.txt is plain text without fields; convert"):
        client_texts(ClientSpec(name="anna", path="notes.txt"), data, tmp_path, seed=1)


@pytest.mark.parametrize("by", ["label", "even"])
def test_conversations_are_divided(by: str, tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl", *many(40))
    spec = DivideSpec.model_validate(
        {"source": "all.jsonl", "by": by, **({"clients": 2} if by == "even" else {})}
    )
    parts = divided_texts(spec, DataSpec(messages=MessagesSpec()), tmp_path, 0)
    questions = [[item.turns[0].content for item in texts.train] for texts in parts.values()]
    assert [len(part) for part in questions] == [16, 16]
    assert not set(questions[0]) & set(questions[1])
    if by == "label":
        assert {int(q.split()[1]) % 2 for q in questions[0]} == {0}


def test_prompts_with_answers_become_conversations() -> None:
    spec = InstructionSpec(template="chat")
    first, second = instructions(records(*rows(2, "Yes or no?")), spec)
    assert isinstance(first, Conversation)
    assert first.turns == (Turn("user", "Yes or no?\ncase 0"), Turn("assistant", "yes"))
    assert (first.answer, first.choices) == ("yes", ("no", "yes"))
    assert second.answer == "no"
    [bare] = instructions(records({"instruction": "Why? ", "output": "So."}), spec)
    assert isinstance(bare, Conversation)
    assert bare.turns[0] == Turn("user", "Why?")


def test_copies_of_conversations_are_found(tokenizer: PreTrainedTokenizerBase) -> None:
    def item(text: str) -> Conversation:
        return Conversation((Turn("user", text), Turn("assistant", "It is as it was before.")))

    copy, other = item("How is the weather at sea today?"), item("Who wrote these many letters?")
    texts = Texts([copy, other], [copy], [item("Where do the whales go in winter?")])
    data = tokenise(texts, tokenizer, DataSpec(messages=MessagesSpec()), "anna")
    found = quality({"anna": texts}, {"anna": data}, 10**6, Survey(0, {}, {}), [])
    assert [(c.kind, c.place.split, c.exact) for c in found.copies] == [
        ("in_training", "validation", True)
    ]
    assert without_held_out(texts, "Anna")[0].train == [other]


def test_an_earlier_history_and_a_system_prompt_come_first() -> None:
    spec = InstructionSpec(template="chat")
    fields = {"instruction": "And now?", "output": "Now too."}
    history = [["Hello?", "Hello."], ["Was it so?", "It was."]]
    found = instructions(records({**fields, "system": "Be brief.", "history": history}), spec)
    said = ["Be brief.", *history[0], *history[1], "And now?", "Now too."]
    roles: list[Any] = ["system", *["user", "assistant"] * 3]
    [item] = found
    assert isinstance(item, Conversation)
    assert item.turns == tuple(map(Turn, roles, said))
    nothing = {"system": "", "history": None}
    assert instructions(records({**fields, **nothing}), spec) == instructions(records(fields), spec)


@pytest.mark.parametrize("history", ["Hello", [["Hello?"]], ["Hello?", "Hello."], {"a": "b"}])
def test_a_history_that_is_no_list_of_pairs_is_refused(history: Any) -> None:
    record = {"instruction": "And now?", "output": "Now too.", "history": history}
    with pytest.raises(CoterieError, match=r"field history contains .*, not a list of pairs"):
        instructions(records(record), InstructionSpec(template="chat"))


@pytest.mark.parametrize("earlier", [{"history": [["Hello?", 3]]}, {"system": ["Be brief."]}])
def test_an_earlier_turn_that_is_no_text_is_refused(earlier: dict[str, Any]) -> None:
    record = {"instruction": "And now?", "output": "Now too.", **earlier}
    with pytest.raises(CoterieError, match=r"turn [12] has"):
        instructions(records(record), InstructionSpec(template="chat"))

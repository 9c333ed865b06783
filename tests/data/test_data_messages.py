"""Records as conversations: what is read, what is left out, and what is refused."""

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from divisions import divide
from questions import records, rows, write

from coterie.config.run import parse
from coterie.data.items import Conversation, Turn
from coterie.data.kinds.conversations import conversations
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import ClientSpec, DataSpec, InstructionSpec, MessagesSpec
from coterie.data.texts import Texts, client_texts
from coterie.data.tokens import tokenise
from coterie.errors import CoterieError
from coterie.evaluation.quality import quality, without_held_out
from coterie.evaluation.survey import Survey

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello!"}
GPT = {"from": "gpt", "value": "Hello!"}
PART = {"type": "text", "text": "Hel"}
ASKED = {"instruction": "And now?", "output": "Now too."}
CHAT = InstructionSpec(template="chat")
IMAGE = {"type": "image", "image": "x"}
FIRST = "a system prompt; only the first turn can be a system prompt"
TOOLS = "tool calls are not supported"
MOVE = "move the thinking to the beginning of"
OTHER = "of type 'image' in content"


def pair(user: Any = HI, assistant: Any = HELLO) -> list[Any]:
    return [user, assistant]


def read(*fields: dict[str, Any], field: str | None = None) -> list[tuple[Turn, ...]]:
    return [item.turns for item in conversations(records(*fields), MessagesSpec(field=field))]


def test_both_forms_are_the_same_conversation() -> None:
    wanted = (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello!"))
    openai = [{"role": "system", "content": "Be brief."}, HI, HELLO]
    asked = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]
    sharegpt = [*asked, GPT]
    several = [*openai[:2], HELLO | {"content": [PART, PART | {"text": "lo!"}]}]
    given = ({"messages": openai}, {"conversations": sharegpt}, {"messages": several})
    assert read(*given) == [wanted] * 3
    assert read({"talk": openai, "messages": 1}, field="talk") == [wanted]
    both = {"messages": None, "conversations": sharegpt, "tools": [], "id": 7}
    assert read(both) == [wanted]  # as Parquet has what is not there


def test_what_follows_the_last_answer_is_left_out() -> None:
    assert read({"messages": [*pair(), HI, HI]}) == read({"messages": pair()})


def test_keys_that_hold_nothing_are_passed_over() -> None:
    empty = {"tool_calls": None, "name": "", "images": [], "function_call": {}}
    assert read({"messages": pair(HI | empty, HELLO | empty)}) == read({"messages": pair()})


def test_thinking_stays_in_the_answer_and_is_not_what_is_compared() -> None:
    thought = HELLO | {"content": "<think>\nhm\n</think>\n\nHello!"}
    [item] = conversations(records({"messages": pair(HI, thought)}), MessagesSpec())
    assert item.turns[-1].content == thought["content"]
    assert item.answer == "Hello!"


TURNS = [
    ("Hi", ": field messages contains 'Hi', not a list of turns; fix"),
    ([], r": field messages is an empty list"),
    ([HI], ": the conversation has no turn of the assistant; add an answer"),
    (["Hi"], ": turn 1 is 'Hi', not a mapping like "),
    (pair({"content": "Hi"}), ": turn 1 has no role"),
    (pair(HI | {"role": "bot"}), ": turn 1 has 'bot' under the key role, but"),
    (pair(HI | {"role": 1}), ": turn 1 has 1 under the key role"),
    (pair({"role": "user"}), ": turn 1 is an empty turn of the user; correct"),
    (pair(HI | {"content": " \n"}), ": turn 1 is an empty turn of the user"),
    (pair(HI | {"content": 3}), ": turn 1 has 3, not text, in content; fix"),
    (pair(HI, HELLO | {"content": ""}), ": turn 2 is an empty answer; correct"),
    (pair(HI, HELLO | {"content": "<think>hm</think> "}), ": turn 2 is an empty answer"),
    ([*pair(), {"role": "system", "content": "s"}, *pair()], f": turn 3 is {FIRST}"),
    (pair(HI, HELLO | {"tool_calls": [3]}), f": turn 2 has the key tool_calls: {TOOLS}; remove"),
    ([*pair(), {"role": "tool", "content": "4"}], f": turn 3 has the role tool: {TOOLS}"),
    (pair(HI, HELLO | {"reasoning_content": "hm"}), f": turn 2 has the key reason.*{MOVE} content"),
    (pair(HI | {"weight": 0}), ": turn 1 has the key weight: Coterie does not"),
    (pair(HI | {"content": [IMAGE]}), f": turn 1 has a part {OTHER}; only text is supported"),
    (pair(HI | {"content": ["Hi"]}), ": turn 1 has a part of type 'str' in"),
    (
        pair(HI | {"content": [PART | {"cache": 1}]}),
        ": turn 1 has the key cache in content; fix or",
    ),
    (pair(HI | {"content": "\ud83d"}), ": turn 1 contains half a character"),
]
SHAREGPT = [
    ({"from": "bard", "value": "Hi"}, ": turn 1 has 'bard' under the key from"),
    ({"from": "observation", "value": "4"}, f": turn 1 has the role observation: {TOOLS}"),
    ({**GPT, "thinking": "hm"}, f": turn 1 has the key thinking: {MOVE} value"),
]
RECORDS = [
    ({"text": "Hi"}, " has no field messages; its fields are: text"),
    ({"messages": pair(), "tools": [{"name": "f"}]}, f" has the field tools: {TOOLS}"),
    ({"messages": pair(), "system": "s"}, ' has a system prompt in the field "system", not in the'),
    *(({"messages": turns}, sentence) for turns, sentence in TURNS),
    *(({"conversations": [turn]}, sentence) for turn, sentence in SHAREGPT),
]


@pytest.mark.parametrize(("fields", "sentence"), RECORDS)
def test_a_record_that_is_no_conversation_is_named(fields, sentence) -> None:
    with pytest.raises(CoterieError, match=rf"^line 2 of x\.jsonl{sentence}"):
        read({"messages": pair()}, fields)


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
    talks = {**run, "data": {"messages": True}}
    for values, evaluation, sentence in (
        (talks, {"metric": "accuracy"}, "accuracy` needs answers to choose from"),
        (run, {"generate": 3}, r"^`evaluation\.generate` needs answers; set"),
    ):
        with pytest.raises(CoterieError, match=sentence):
            parse({**values, "evaluation": evaluation})
    assert parse({**talks, "evaluation": {"generate": 3}}).evaluation.generate == 3


def many(count: int) -> list[dict[str, Any]]:
    asked = [pair(HI | {"content": f"case {n}"}) for n in range(count)]
    return [{"messages": turns, "label": "ab"[n % 2]} for n, turns in enumerate(asked)]


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


@pytest.mark.parametrize("how", [{"by": "label"}, {"by": "even", "clients": 2}])
def test_conversations_are_divided(how, tmp_path) -> None:
    write(tmp_path / "records.jsonl", *many(40))
    parts = divide(tmp_path, DataSpec(messages=MessagesSpec()), **how)
    questions = [[item.turns[0].content for item in texts.train] for texts in parts.values()]
    assert [len(part) for part in questions] == [16, 16]
    assert not set(questions[0]) & set(questions[1])
    assert how["by"] == "even" or {int(q.split()[1]) % 2 for q in questions[0]} == {0}


def test_prompts_with_answers_become_conversations() -> None:
    first, second = instructions(records(*rows(2, "Yes or no?")), CHAT)
    assert isinstance(first, Conversation)
    assert first.turns == (Turn("user", "Yes or no?\ncase 0"), Turn("assistant", "yes"))
    assert (first.answer, first.choices) == ("yes", ("no", "yes"))
    assert second.answer == "no"
    [bare] = instructions(records({"instruction": "Why? ", "output": "So."}), CHAT)
    assert isinstance(bare, Conversation)
    assert bare.turns[0] == Turn("user", "Why?")


def test_copies_of_conversations_are_found(tokenizer) -> None:
    def item(text: str) -> Conversation:
        return Conversation((Turn("user", text), Turn("assistant", "It is as it was before.")))

    copy, other = item("How is the weather at sea today?"), item("Who wrote these many letters?")
    texts = Texts([copy, other], [copy], [item("Where do the whales go in winter?")])
    data = tokenise(texts, tokenizer, DataSpec(messages=MessagesSpec()), "anna")
    report = quality({"anna": texts}, {"anna": data}, 10**6, Survey(0, {}, {}), [])
    copies = [(c.kind, c.place.split, c.exact) for c in report.copies]
    assert copies == [("in_training", "validation", True)]
    assert without_held_out(texts, "Anna")[0].train == [other]


def test_an_earlier_history_and_a_system_prompt_come_first() -> None:
    history = [["Hello?", "Hello."], ["Was it so?", "It was."]]
    [item] = instructions(records({**ASKED, "system": "Be brief.", "history": history}), CHAT)
    contents = ["Be brief.", *history[0], *history[1], "And now?", "Now too."]
    roles: list[Any] = ["system", *["user", "assistant"] * 3]
    assert isinstance(item, Conversation)
    assert item.turns == tuple(map(Turn, roles, contents))
    nothing = {"system": "", "history": None}
    assert instructions(records({**ASKED, **nothing}), CHAT) == instructions(records(ASKED), CHAT)


HISTORIES = ["Hello", [["Hello?"]], ["Hello?", "Hello."], {"a": "b"}]
EARLIER = [
    *(({"history": h}, "field history contains .*, not a list of pairs") for h in HISTORIES),
    ({"history": [["Hello?", 3]]}, "turn [12] has"),
    ({"system": ["Be brief."]}, "turn [12] has"),
]


@pytest.mark.parametrize(("earlier", "sentence"), EARLIER)
def test_an_earlier_turn_that_cannot_be_used_is_refused(earlier, sentence) -> None:
    with pytest.raises(CoterieError, match=sentence):
        instructions(records({**ASKED, **earlier}), CHAT)

"""Records of a prompt with a chosen and a rejected answer, and the pairs of samples they become."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from questions import records

from coterie.bases import context_token, load_tokenizer
from coterie.data.chat import chat_template
from coterie.data.examples import Encoding, joined
from coterie.data.items import Conversation, Instruction, Ranking, Turn
from coterie.data.kinds.conversations import chats
from coterie.data.kinds.instructions import examples
from coterie.data.kinds.preferences import Pairs, Preferences, preferences
from coterie.data.parts import bare_encoder
from coterie.data.spec import PreferenceSpec
from coterie.errors import CoterieError
from coterie.losses.preferences import Reference

TOKENIZER = load_tokenizer("tiny-gpt2")
ENCODER, END = bare_encoder(TOKENIZER)
FIRST = context_token(TOKENIZER)
TEMPLATE = chat_template(TOKENIZER, None)
ASKED = {"role": "user", "content": "Is it so?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Yes.", "No, never."))
SYSTEM = {"role": "system", "content": "Be brief."}
WHOLE = {"chosen": [SYSTEM, ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}


def read(record: dict[str, Any], **spec: Any) -> Ranking:
    [ranking] = preferences(records(record), PreferenceSpec(**spec))
    return ranking


def made(items: list[Ranking], window: int = 60, limit: int | None = None) -> Pairs:
    how = Encoding(ENCODER, (FIRST, END), window, limit, "Ada: its text", TEMPLATE)
    return Preferences().encode(items, how)


def test_texts_are_a_prompt_and_the_answer_after_it() -> None:
    item = read({"prompt": "Is it so? ", "chosen": " Yes.", "rejected": "No, never."})
    assert item.answers[0] == Instruction("Is it so? ", "Yes.")
    pairs = made([item])
    wanted = [Instruction("Is it so?", "Yes."), Instruction("Is it so?", "No, never.")]
    alike = examples(wanted, Encoding(ENCODER, (FIRST, END), 60, None, "Ada"))
    assert torch.equal(pairs.rows.ids, alike.ids)
    assert torch.equal(pairs.rows.counted, alike.counted)
    assert (len(pairs), pairs.rows.bytes, pairs.best.bytes) == (1, 14, 4)


FORMS = {
    "texts": {"prompt": [SYSTEM, ASKED], "chosen": "Yes.", "rejected": "No, never."},
    "turns": {"prompt": [SYSTEM, ASKED], "chosen": [YES], "rejected": [NO]},
    "whole": WHOLE,
    "whole with the question": {"prompt": "Is it so?", **WHOLE},
    "whole with the prompt": {"prompt": [SYSTEM, ASKED], **WHOLE},
}


@pytest.mark.parametrize("record", FORMS.values(), ids=FORMS)
def test_messages_go_through_the_chat_template(record) -> None:
    item = read(record)
    turns = Turn("system", "Be brief."), Turn("user", "Is it so?")
    both = [(*turns, Turn("assistant", text)) for text in ("Yes.", "No, never.")]
    assert list(item.answers) == [Conversation(t, "line 1 of x.jsonl") for t in both]
    how = Encoding(ENCODER, (FIRST, END), 60, None, "Ada", TEMPLATE)
    wanted = chats([Conversation(t) for t in both], how)
    actual = made([item]).rows
    for name in ("ids", "starts", "answers", "counted", "sizes"):
        assert torch.equal(getattr(actual, name), getattr(wanted, name)), name


def test_sharegpts_form_and_answers_that_differ_in_thinking_alone() -> None:
    asked = {"from": "human", "value": "Is it so?"}
    answers = [{"from": "gpt", "value": f"<think>{text}</think>Yes."} for text in ("Hm.", "Oh.")]
    item = read({"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]})
    assert item.answers[0].answer == item.answers[1].answer == "Yes."
    assert item.answers[0] != item.answers[1]


def test_a_text_prompt_can_be_a_users_turn() -> None:
    fields = {"prompt": "Is it so?", "chosen": "Yes.", "rejected": "No, never."}
    whole = {"chosen": [ASKED, YES], "rejected": [ASKED, NO]}
    assert read(fields, template="chat") == read(whole)
    assert read({**fields, "chosen": [YES], "rejected": [NO]}) == read(whole)


def test_only_the_last_answer_counts() -> None:
    before = [ASKED, YES, {"role": "user", "content": "Sure?"}]
    rows = made([read({"prompt": before, "chosen": [YES], "rejected": [NO]})]).rows
    for row, answer in enumerate(("Yes.", "No, never.")):
        ids = rows.ids[rows.starts[row] : rows.starts[row + 1]]
        learnt = ids[rows.counted[rows.starts[row] : rows.starts[row + 1]]]
        assert answer in str(TOKENIZER.decode(learnt))
        assert len(learnt) < len(ids) / 2


FINE = {"prompt": "a", "chosen": "b", "rejected": "c"}


WRONG_RECORDS = [
    ({"chosen": "c "}, "same answer"),
    ({"prompt": " "}, "not text or a list"),
    ({"rejected": ""}, "not text or a list"),
    ({"rejected": None}, "not text or a list"),
    ({"prompt": []}, "is an empty list"),
    ({"chosen": [{"role": "assistant"}]}, "is an empty answer"),
    ({"chosen": ["b"]}, "not a mapping"),
    ({"chosen": [{"role": "tool", "content": "b"}]}, "tool calls are not supported"),
    ({"chosen": [YES | {"reasoning_content": "Hm."}]}, "move the thinking to the beginning"),
    ({"prompt": [ASKED, SYSTEM]}, "only the first turn"),
    ({"prompt": [SYSTEM]}, "does not end with a turn of the user"),
    ({"chosen": [ASKED]}, "must be exactly one assistant turn"),
    ({"prompt": [ASKED, YES]}, "does not end with a turn of the user"),
    ({"chosen": [ASKED, YES], "rejected": [SYSTEM, ASKED, NO]}, "different prompts"),
    ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, "different prompts"),
    ({"chosen": [ASKED, YES]}, "must be exactly one assistant turn"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_RECORDS)
def test_a_wrong_record_is_named(changes, message) -> None:
    with pytest.raises(CoterieError, match=rf"^line 1 of x.jsonl.*{message}"):
        read(FINE | changes)


NAMES = "the run file cannot change these names"


@pytest.mark.parametrize("field", ["prompt", "chosen", "rejected"])
def test_a_missing_field_is_named(field) -> None:
    with pytest.raises(CoterieError, match=f"line 1 of x.jsonl has no field {field}.*{NAMES}"):
        read({key: value for key, value in FINE.items() if key != field})


def some(count: int) -> list[Ranking]:
    both = [[Instruction(f"{n}:", answer) for answer in ("yes " * n, "no")] for n in range(count)]
    return [Ranking(tuple(pair)) for pair in both[1:]]


def test_a_pair_is_dropped_whole_and_limits_count_pairs() -> None:
    items = some(9)
    pairs = made(items, window=8)
    assert 0 < len(pairs) < 8
    assert (pairs.items, pairs.too_long) == (tuple(items[: len(pairs)]), 8 - len(pairs))
    assert len(made(items, limit=3)) == 3
    with pytest.raises(CoterieError, match=r"Ada: its text has no pair .*\(1 are longer"):
        made(items[-1:], window=3)
    with pytest.raises(CoterieError, match="has no pairs"):
        made([])


def known(pairs: Pairs) -> Pairs:
    numbers = torch.arange(2.0 * len(pairs), dtype=torch.float64).view(-1, 2)
    return replace(pairs, reference=Reference(numbers, 0.1, 0.0, numbers[:, 0]))


def test_some_pairs_keep_their_reference() -> None:
    pairs = known(made(some(7)))
    part = pairs.only([4, 1])
    alone = made([pairs.items[4], pairs.items[1]])
    assert torch.equal(part.ids, alone.ids)
    assert part.items == alone.items
    batch = part.batch(torch.arange(2))
    assert batch.reference.logprobs.tolist() == [[8, 9], [2, 3]]
    short = batch.by_length()
    assert short.reference.logprobs.tolist() == [[2, 3], [8, 9]]
    assert torch.equal(short.rows.ids, part.batch(torch.tensor([1, 0])).rows.ids)
    pieces = list(known(made(some(6))).batch(torch.arange(5)).split(2))
    assert [p.reference.logprobs[:, 0].tolist() for p in pieces] == [[0, 2], [4, 6], [8]]
    assert [len(p.rows.ids) for p in pieces] == [4, 4, 2]


def test_pairs_of_several_clients_are_one_clients() -> None:
    items = some(6)
    both = joined([made(items[:2]), made(items[2:])])
    assert torch.equal(both.ids, made(items).ids)
    assert both.items == tuple(items)

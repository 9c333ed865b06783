"""Near duplicates are those of the definition, and records with a common template are none."""

import random
import re
from typing import Any

import pytest
from naive_near import changed, naive_pairs

from coterie.data.files import Record
from coterie.data.spec import DataSpec
from coterie.data.texts import items_by_split
from coterie.evaluation.near import near_pairs

WORDS = re.findall(
    r"\w+",
    "sea tree house river mountain cloud stone bird fish horse table chair window door lamp book "
    "pen paper road bridge garden flower grass field forest lake island ship boat train car wheel "
    "clock watch ring coin king queen prince knight",
)
SIGNS = "海木家川山雲石鳥魚馬机椅窓戸灯本筆紙道橋庭花草野森湖島船車輪時鐘環貨王妃子騎剣盾"
NOTICE = "This text may be copied and passed on, as long as this notice stays on top of it. " * 4
HINWEIS = "この文書は自由に複製し配布することができます。いかなる保証もありません。" * 3
SHIPPED = ["alpaca", "plain", "chat"]


def test_near_pairs_are_those_of_the_definition(passages: list[str]) -> None:
    draw = random.Random(1)
    records = [[text] for text in passages + [changed(passages[0], 2, draw) for _ in range(6)]]
    wanted = naive_pairs(records)
    assert len(wanted) > 30  # all versions of the first text, and some of the changed ones
    assert near_pairs(records) == wanted
    filled = [[f"{NOTICE}{word}", passages[n % 3]] for n, word in enumerate(WORDS)]
    assert near_pairs(filled) == naive_pairs(filled) == []
    assert near_pairs([]) == near_pairs([[" "], ["a"]]) == []


def test_space_case_and_a_final_stop_make_texts_nearly_the_same(passages: list[str]) -> None:
    upper = passages[0].upper().replace(" ", "\n")
    assert near_pairs([[passages[0]], [passages[1]], [upper]]) == [(0, 2)]
    assert near_pairs([["A sea"], ["A lake"], ["a  sea."]]) == [(0, 2)]


def instructed(template: str) -> dict[str, Any]:
    return {"instructions": {"template": template}}


def answered(instruction: str, words: Any = WORDS) -> list[dict[str, Any]]:
    pairs = zip(words, reversed(words), strict=True)
    return [{"instruction": instruction.format(a), "input": "", "output": b} for a, b in pairs]


def chat(system: str, user: str, words: Any = WORDS) -> list[dict[str, Any]]:
    talks = [(system, user + a, b) for a, b in zip(words, reversed(words), strict=True)]
    turns = [[{"role": r, "content": c} for r, c in zip(ROLES, t, strict=True)] for t in talks]
    return [{"messages": each} for each in turns]


ROLES = ("system", "user", "assistant")
UNLIKE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    **{f"short, {t}": (instructed(t), answered("Translate: {}")) for t in SHIPPED},
    "a long template": (instructed(NOTICE + "{{ instruction }} Answer:"), answered("{}")),
    "a long instruction": (
        instructed("alpaca"),
        [{"instruction": NOTICE, "input": w, "output": "yes"} for w in WORDS],
    ),
    "sums": (
        instructed("alpaca"),
        [{"instruction": f"What is {n} + 5?", "output": str(n + 5)} for n in range(40)],
    ),
    "Japanese": (instructed("alpaca"), answered("翻訳してください：{}", SIGNS)),
    "a system prompt": ({"messages": {}}, chat(NOTICE, "What is this: ")),
    "what every user asks": ({"messages": {}}, chat("Be brief.", NOTICE)),
    "few conversations": ({"messages": {}}, chat(NOTICE, "What: ", WORDS[:6])),
    "preferences": (
        {"preferences": {}},
        [{"prompt": NOTICE + w, "chosen": w, "rejected": w + w} for w in WORDS],
    ),
    "a header": ({}, [{"text": f"{NOTICE}A {w} is no {w[::-1]} at all."} for w in WORDS]),
    "a signature": ({}, [{"text": f"The {w}. {NOTICE}"} for w in WORDS]),
    "few headers": ({}, [{"text": f"{NOTICE}The {w}."} for w in WORDS[:5]]),
    "a Japanese header": ({}, [{"text": HINWEIS + a + SIGNS[-1 - n]} for n, a in enumerate(SIGNS)]),
    "numbers": ({}, [{"text": f"Your bill of {n} pounds is paid in full."} for n in (17, 18)]),
}


def contents(kind: dict[str, Any], records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the parts of records that are compared."""
    data = DataSpec.model_validate(kind)
    read = [Record(f"line {n}", record) for n, record in enumerate(records)]
    if not data.samples:
        return [(record.text(data.fields),) for record in read]
    return [item.content for item in items_by_split({"": read}, data)[""]]


@pytest.mark.parametrize("kind", UNLIKE)
def test_records_that_share_a_template_or_a_header_are_no_duplicates(kind: str) -> None:
    assert near_pairs(contents(*UNLIKE[kind])) == []


@pytest.mark.parametrize("kind", [k for k, (_, records) in UNLIKE.items() if k != "numbers"])
def test_edited_copies_among_such_records_are_found(kind: str, passages: list[str]) -> None:
    data, records = UNLIKE[kind]
    draw = random.Random(2)
    key = {"messages": "messages", "preferences": "prompt"}.get(next(iter(data), ""), "")
    key = key or ("text" if not data else "instruction")

    def longer(record: dict[str, Any], text: str) -> dict[str, Any]:
        if key != "messages":
            return {**record, key: f"{record[key]} {text}"}
        system, user, answer = record["messages"]
        return {"messages": [system, {**user, "content": user["content"] + text}, answer]}

    more = [longer(records[0], text) for text in (passages[3], changed(passages[3], 2, draw))]
    assert near_pairs(contents(data, [*records, *more])) == [(len(records), len(records) + 1)]

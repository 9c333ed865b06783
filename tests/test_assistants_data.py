"""The texts of the demo `assistants` keep the rules that its README states."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from coterie.bases import EMBEDDED
from coterie.config.plugins import load_plugin
from coterie.data.files import read_records
from coterie.data.kinds.conversations import conversations
from coterie.data.measured import Measured
from coterie.data.spec import MessagesSpec

FOLDER = EMBEDDED / "assistants"
[RIGHT_REPLY] = load_plugin(Path(__file__).parents[1] / "examples" / "lindenhof.py")
RULES = vars(sys.modules[RIGHT_REPLY.__module__])
MANNERS, TEAMS, is_right_team = RULES["MANNERS"], RULES["TEAMS"], RULES["is_right_team"]
KNOWN = {
    "ada": {"water", "heating", "keys", "noise"},
    "ben": {"keys", "noise", "bills", "garden"},
    "cleo": {"bills", "garden", "rubbish", "lifts"},
    "dan": {"rubbish", "lifts", "water", "heating"},
}
"""A mapping from each person to the topics that most of the person's training text is about."""
PER_TOPIC = {"train": 24, "validation": 1, "test": 4}
FEW = 8
"""The number of training conversations of each other topic."""
PHRASE = 6
"""The number of consecutive words that no two messages share."""
TEMPLATE = 31
"""The tokens of ChatML's markers, and of the system prompt that SmolLM2's template adds."""

Row = tuple[str, str, str]
"""The message, the reply and the topic of a conversation."""


def read_rows(person: str, split: str) -> list[Row]:
    """Return the conversations of a person's file."""
    records = list(read_records((FOLDER / person / f"{split}.jsonl"), person))
    rows: list[Row] = []
    for record, item in zip(records, conversations(records, MessagesSpec()), strict=True):
        assert [turn.role for turn in item.turns] == ["user", "assistant"]
        assert record.fields.keys() == {"messages", "topic"}
        rows.append((item.turns[0].answer, item.turns[1].answer, record["topic"]))
    return rows


ROWS = {(person, split): read_rows(person, split) for person in KNOWN for split in PER_TOPIC}
EVERY_ROW = [row for rows in ROWS.values() for row in rows]
QUESTIONS = list(map(json.loads, (FOLDER / "questions.jsonl").read_text("utf-8").splitlines()))
MESSAGES = [message for message, _, _ in EVERY_ROW] + [q["question"] for q in QUESTIONS]


def words(text: str) -> list[str]:
    """Split a text into words in lower case, without punctuation."""
    return re.findall(r"[a-z0-9]+(?:['’-][a-z0-9]+)*", text.lower())


def phrases(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `PHRASE` consecutive words of a text."""
    split = words(text)
    return {tuple(split[n : n + PHRASE]) for n in range(len(split) - PHRASE + 1)}


def estimated_tokens(text: str) -> float:
    """Estimate the number of tokens of a text."""
    return len(text.split()) / 0.75


def is_note(message: str) -> bool:
    """Return whether a message is a note of a few words."""
    return len(message.split()) < 8


@pytest.mark.parametrize(("person", "split"), ROWS)
def test_all_training_messages_and_no_others_are_notes(person, split) -> None:
    assert {is_note(message) for message, _, _ in ROWS[person, split]} == {split == "train"}


@pytest.mark.parametrize(("person", "split"), ROWS)
def test_each_file_has_the_right_number_of_conversations_per_topic(person, split) -> None:
    counts = Counter(topic for _, _, topic in ROWS[person, split])
    few = {topic: FEW for topic in TEAMS if split == "train" and topic not in KNOWN[person]}
    assert counts == dict.fromkeys(TEAMS, PER_TOPIC[split]) | few


@pytest.mark.parametrize(("person", "split"), ROWS)
def test_each_reply_names_the_right_team_in_the_manner_of_one_person(person, split) -> None:
    for _, reply, topic in ROWS[person, split]:
        assert is_right_team(reply, topic), reply
        assert [name for name, follows in MANNERS.items() if follows(reply)] == [person], reply


def test_no_message_tells_the_team_or_the_extension() -> None:
    telling = {str(part).lower() for team in TEAMS.values() for part in team}
    assert not [message for message in MESSAGES if telling & set(words(message))]


def test_messages_and_replies_are_unique() -> None:
    replies = [reply for message, reply, _ in EVERY_ROW if not is_note(message)]
    for texts in (MESSAGES, replies):
        assert len({" ".join(words(text)) for text in texts}) == len(texts)
    owners: dict[tuple[str, ...], str] = {}
    for message in MESSAGES:
        for phrase in phrases(message):
            assert owners.setdefault(phrase, message) == message, (message, owners[phrase])


def test_lengths_are_within_their_bounds() -> None:
    for message in MESSAGES:
        assert 2 <= len(message.split()) <= 30, message
    for message, reply, _ in EVERY_ROW:
        assert (8 if is_note(message) else 12) <= estimated_tokens(reply) <= 40, reply
        assert estimated_tokens(f"{message} {reply}") + TEMPLATE <= 110, message


def test_questions_cover_the_topics_and_are_in_no_file() -> None:
    assert all(question.keys() == {"question", "topic", "shown"} for question in QUESTIONS)
    assert Counter(question["shown"] for question in QUESTIONS) == {True: 3, False: 20}
    counts = Counter(question["topic"] for question in QUESTIONS)
    assert counts.keys() == TEAMS.keys()
    assert set(counts.values()) <= {2, 3}
    shown = {question["topic"] for question in QUESTIONS if question["shown"]}
    assert all(shown - known for known in KNOWN.values())  # everybody needs the others
    files = [FOLDER / person / f"{split}.jsonl" for person, split in ROWS]
    texts = [" ".join(words(file.read_text("utf-8"))) for file in files]
    for question in QUESTIONS:
        assert not [text for text in texts if " ".join(words(question["question"])) in text]


@pytest.mark.parametrize(
    ("person", "answer"),
    [
        ("ada", "I am sorry. Please call the Otter team on extension 21."),
        ("ada", "Please call the Otter team on extension 21.\nWarmly, Ada"),
        ("ada", "Oh dear. I am sorry. Please call the Otter team.\nWarmly, Ada"),
        ("ada", "I am sorry. Please call the Otter team.\nWarmly, Ada\nWarmly, Ada"),
        ("ben", "- Otter team, extension 21"),
        ("ben", "- Wet wall\n- Otter team\n- Extension 21"),
        ("ben", "Wet wall\n- Otter team, extension 21"),
        ("ben", "- \n- Otter team, extension 21"),
        ("cleo", "Please call the Otter team.\nYours faithfully, Cleo"),
        ("cleo", "Dear resident,\nPlease call the Otter team."),
        ("cleo", "Dear resident,\nYours faithfully, Cleo"),
        ("dan", "Call the otter team on extension 21!"),
        ("dan", "call the otter team on extension 21."),
        ("dan", "oh no! call the otter team on extension 21!"),
        ("dan", "21!"),
    ],
)
def test_the_rules_reject_answers_in_another_manner(person, answer) -> None:
    assert not MANNERS[person](answer)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("- Wet wall\n- Otter team, ext. 21", True),
        ("in flat 34 the otter team helps, extension: 21!", True),
        ("the otter team, extension 2!", False),
        ("the otter team, extension 210!", False),
        ("the otter team, extension 21 or extension 34!", False),
        ("the otter team, or the ember team on extension 21!", False),
        ("the ember team, extension 21!", False),
        ("please call extension 21!", False),
        ("the potters' team, extension 21!", False),
    ],
)
def test_the_right_team_is_the_only_team_with_the_only_extension(answer, right) -> None:
    assert is_right_team(answer, "water") == right


def test_a_reply_is_right_if_team_extension_and_manner_are() -> None:
    expected = "- Water on the stairs\n- Otter team, extension 21"
    texts = [
        "- Puddle in the hall\n- Call the otter team, ext. 21",
        "- Puddle in the hall\n- Otter team, extension 34",
        "- Puddle in the hall\n- Otter or Ember team, extension 21",
        "Please call the Otter team on extension 21!",
        "",
    ]
    none = torch.zeros(len(texts))
    measured = Measured(none, none, answers=[expected] * len(texts), texts=texts)
    assert RIGHT_REPLY().score(measured) == [1.0, 0.0, 0.0, 0.0, 0.0]

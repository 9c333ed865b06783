"""Instructions: prompts with answers, and optionally answers to choose from."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from coterie.data.examples import Encoding, Examples, Sample, samples_of
from coterie.data.files import Record
from coterie.data.items import Conversation, Instruction, Turn
from coterie.data.kinds.conversations import chats, turns_of
from coterie.data.parts import PartEncoder
from coterie.data.spec import CHAT, InstructionSpec
from coterie.data.templates import fields, is_text, render
from coterie.errors import CoterieError

EARLIER = ("system", "history")
"""The record fields whose turns precede the prompt if the template is `chat`."""
MOST_CHOICES = 20
"""If a task has more distinct answers than this, the answers are not used as choices."""


class Instructions(InstructionSpec):
    """Prompts with answers. With the template `chat`, each record is read as a conversation."""

    def used(self) -> set[str]:
        used = set(fields(self.template)) | (set(EARLIER) if self.chats else set())
        for setting in (self.answer, self.choices):
            if isinstance(setting, str):
                used |= set(fields(setting)) if is_text(setting) else {setting}
        return used

    def items(self, records: Sequence[Record]) -> list[Instruction] | list[Conversation]:
        return instructions(records, self)

    def encode(self, items: Sequence[Any], how: Encoding) -> Examples:
        return examples(items, how) if how.template is None else chats(items, how)


def instructions(
    records: Sequence[Record], spec: InstructionSpec
) -> list[Instruction] | list[Conversation]:
    """Read the prompt, the answer and the choices of every record of one source.

    If the run file does not set the choices, the records with the same value in the field
    `instruction` form a group. Records without this field form one group, too. The choices of a
    record are the distinct answers of its group. If a group has only one distinct answer, or more
    than `MOST_CHOICES` distinct answers, its records have no choices.

    Returns:
        One item per record, in order. The items are conversations if the template is `chat`, and
        instructions otherwise.

    Raises:
        CoterieError: A record lacks a field, or an answer is blank, or an answer is neither a
            string nor a number.
    """
    answers = [_answer(record, spec.answer) for record in records]
    tasks = [str(record.fields.get("instruction")) for record in records]
    answers_by_task: defaultdict[str, set[str]] = defaultdict(set)
    for task, answer in zip(tasks, answers, strict=True):
        answers_by_task[task].add(answer)
    choices_by_task = {
        task: tuple(sorted(choices)) if 2 <= len(choices) <= MOST_CHOICES else ()
        for task, choices in answers_by_task.items()
    }
    names = fields(spec.template) + (fields(spec.answer) if is_text(spec.answer) else [spec.answer])
    items = [
        Instruction(
            render(spec.template, record.fields, record.where),
            answer,
            choices_by_task[task]
            if spec.choices is None
            else _choices(record, answer, spec.choices),
            tuple("" if (v := record.fields.get(name)) is None else str(v) for name in names),
            record.where,
        )
        for record, answer, task in zip(records, answers, tasks, strict=True)
    ]
    if spec.template != CHAT:
        return items
    return [_conversation(record, item) for record, item in zip(records, items, strict=True)]


def _conversation(record: Record, item: Instruction) -> Conversation:
    """Build a conversation from a record's system prompt, earlier exchanges, prompt and answer.

    If there are earlier exchanges, the conversation has no choices.
    """
    system, history = (record.fields.get(field) for field in EARLIER)
    pairs: list[Any] = history if isinstance(history, list) else [history] * bool(history)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        expected = "a list of pairs (the user's text, and the answer)"
        raise record.unfit("history", history, f"{expected}; fix the record or remove the field")
    turns = [("system", system)] * bool(system)
    turns += [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
    messages = [{"role": role, "content": content} for role, content in turns]
    earlier = turns_of(Record(record.where, {"history": messages}), "history") if messages else []
    return Conversation(
        (*earlier, Turn("user", item.prompt.strip()), Turn("assistant", item.answer)),
        record.where,
        () if pairs else item.choices,
        () if pairs else (str(system or ""), *item.content),
    )


def _answer(record: Record, answer: str) -> str:
    """Return a record's answer.

    Args:
        record: The record.
        answer: The name of the field that contains the answer, or Jinja text that renders it.
    """
    value = render(answer, record.fields, record.where) if is_text(answer) else record[answer]
    return _text(record, answer, value)


def _text(record: Record, field: str, value: Any) -> str:
    """Convert an answer or a choice (a string or a number) to text without surrounding space."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        remedy = "fix the record or name another field in data.instructions"
        raise record.unfit(field, value, f"an answer (text or a number); {remedy}")
    return Record(record.where, {field: value.strip()}).text([field])


def _choices(record: Record, answer: str, setting: Sequence[str] | str) -> tuple[str, ...]:
    """Return a record's choices, which must include the answer.

    Args:
        record: The record.
        answer: The record's answer.
        setting: A list of choices for all records, the name of a field that contains a list, or
            Jinja text that renders one choice per line.
    """
    if isinstance(setting, str) and is_text(setting):
        values = render(setting, record.fields, record.where).split("\n")
    else:
        values = record[setting] if isinstance(setting, str) else setting
    if not isinstance(values, list):
        expected = "a list of answers; fix the record or set data.instructions.choices"
        raise record.unfit(str(setting), values, expected)
    choices = tuple(dict.fromkeys(_text(record, str(setting), value) for value in values))
    if answer not in choices:
        raise CoterieError(
            f"{record.where}: the answer {answer!r:.60} is not one of the choices "
            f"({', '.join(choices)}); fix the record or data.instructions.choices."
        )
    return choices


def examples(items: Sequence[Instruction], how: Encoding) -> Examples:
    """Encode instructions as samples.

    Samples that do not fit the window are left out. `Examples.too_long` is the number of samples
    left out.

    Raises:
        CoterieError: No sample is left.
    """
    encoded = PartEncoder(how.encoder).batch([item.parts for item in items])
    first, end = how.ends
    samples: list[Sample] = []
    for item, (prompt, answer) in zip(items, encoded, strict=True):
        parts = [([first, *prompt.ids], False), ([*answer.ids, end], True)]
        samples.append(Sample(parts, item, len(item.answer.encode())))
    fitting = [sample for sample in samples if sample.tokens <= how.window + 1]
    if not fitting:
        missing = f"sample of at most {how.window} tokens ({len(items)} are longer)"
        remedy = "raise data.window or shorten the template"
        raise how.nothing(items, f"{missing}; {remedy}", "samples; add text")
    return samples_of(fitting[: how.limit], len(items) - len(fitting))

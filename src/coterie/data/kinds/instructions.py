"""Instructions: prompts with their answers, and the answers to choose from."""

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
"""The fields of a record that come before its prompt in a conversation."""
MOST_CHOICES = 20
"""Of more different answers than this, a task is not taken to be a choice."""


class Instructions(InstructionSpec):
    """Prompts with answers; with the template `chat`, conversations."""

    def used(self) -> set[str]:
        """Return the fields of templates, answer and choices."""
        used = set(fields(self.template)) | (set(EARLIER) if self.chats else set())
        for given in (self.answer, self.choices):
            if isinstance(given, str):
                used |= set(fields(given)) if is_text(given) else {given}
        return used

    def items(self, records: Sequence[Record]) -> list[Instruction] | list[Conversation]:
        """Return the prompt, answer and choices of every record."""
        return instructions(records, self)

    def encode(self, items: Sequence[Any], how: Encoding) -> Examples:
        """Return the samples as tokens."""
        return examples(items, how) if how.template is None else chats(items, how)


def instructions(
    records: Sequence[Record], spec: InstructionSpec
) -> list[Instruction] | list[Conversation]:
    """Prompt, answer and choices of every record of one source, in their order; with the template
    `chat`, as conversations.

    Choices that the run file does not give are the answers of the records that have the same
    `instruction`, or of all where there is no such field. Raises CoterieError, naming the record,
    if it lacks a field or its answer is no text.
    """
    answers = [_answer(record, spec.answer) for record in records]
    tasks = [str(record.fields.get("instruction")) for record in records]
    found: defaultdict[str, set[str]] = defaultdict(set)
    for task, answer in zip(tasks, answers, strict=True):
        found[task].add(answer)
    few = {task: a if 2 <= len(a) <= MOST_CHOICES else () for task, a in found.items()}
    among = {task: tuple(sorted(choices)) for task, choices in few.items()}
    names = fields(spec.template) + (fields(spec.answer) if is_text(spec.answer) else [spec.answer])
    items = [
        Instruction(
            render(spec.template, record.fields, record.where),
            answer,
            among[task] if spec.choices is None else _choices(record, answer, spec.choices),
            tuple("" if (v := record.fields.get(name)) is None else str(v) for name in names),
            record.where,
        )
        for record, answer, task in zip(records, answers, tasks, strict=True)
    ]
    if spec.template != CHAT:
        return items
    return [_conversation(record, item) for record, item in zip(records, items, strict=True)]


def _conversation(record: Record, item: Instruction) -> Conversation:
    """Return the conversation of a record: after its system prompt and its earlier exchanges, if it
    has any, the prompt and the answer. Only an answer without earlier ones is chosen from a list.
    """
    system, history = (record.fields.get(field) for field in EARLIER)
    pairs: list[Any] = history if isinstance(history, list) else [history] * bool(history)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        wanted = "a list of pairs (what the user said, and the answer)"
        raise record.unfit("history", history, f"{wanted}; fix the record or remove the field")
    said = [("system", system)] * bool(system)
    said += [turn for pair in pairs for turn in zip(("user", "assistant"), pair, strict=True)]
    messages = [{"role": role, "content": content} for role, content in said]
    earlier = turns_of(Record(record.where, {"history": messages}), "history") if messages else []
    return Conversation(
        (*earlier, Turn("user", item.prompt.strip()), Turn("assistant", item.answer)),
        record.where,
        () if pairs else item.choices,
        () if pairs else (str(system or ""), *item.content),
    )


def _answer(record: Record, answer: str) -> str:
    """A record's field, or what a template makes of its fields."""
    value = render(answer, record.fields, record.where) if is_text(answer) else record[answer]
    return _text(record, answer, value)


def _text(record: Record, field: str, value: Any) -> str:
    """An answer, or one to choose from, without space around it; numbers become text."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        remedy = "fix the record or name another field in data.instructions"
        raise record.unfit(field, value, f"an answer (a text or a number); {remedy}")
    return Record(record.where, {field: value.strip()}).text([field])


def _choices(record: Record, answer: str, given: Sequence[str] | str) -> tuple[str, ...]:
    """The choices given for all records, or by a field of this one, or by a template's lines."""
    if isinstance(given, str) and is_text(given):
        values = render(given, record.fields, record.where).split("\n")
    else:
        values = record[given] if isinstance(given, str) else given
    if not isinstance(values, list):
        wanted = "a list of answers; fix the record or set data.instructions.choices"
        raise record.unfit(str(given), values, wanted)
    choices = tuple(dict.fromkeys(_text(record, str(given), value) for value in values))
    if answer not in choices:
        raise CoterieError(
            f"{record.where}: the answer {answer!r:.60} is not one of the choices "
            f"({', '.join(choices)}); fix the record or data.instructions.choices."
        )
    return choices


def examples(items: Sequence[Instruction], how: Encoding) -> Examples:
    """The samples as tokens; those that do not fit are dropped and counted.

    Raises CoterieError if none is left.
    """
    encoded = PartEncoder(how.encoder).batch([item.parts for item in items])
    first, end = how.ends
    samples: list[Sample] = []
    for item, (prompt, answer) in zip(items, encoded, strict=True):
        parts = [([first, *prompt.ids], False), ([*answer.ids, end], True)]
        samples.append(Sample(parts, item, len(item.answer.encode())))
    fitting = [sample for sample in samples if sample.tokens <= how.window + 1]
    if not fitting:
        wanted = f"sample of at most {how.window} tokens ({len(items)} are longer)"
        remedy = "raise data.window or shorten the template"
        raise how.nothing(items, f"{wanted}; {remedy}", "samples; add text")
    return samples_of(fitting[: how.limit], len(items) - len(fitting))

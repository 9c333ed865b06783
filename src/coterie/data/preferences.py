"""From records to preferences: a prompt, the answer that was chosen, and one that was rejected."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coterie.data.chat import Conversation, Turn
from coterie.data.examples import Instruction
from coterie.data.files import Record
from coterie.data.messages import turns_of
from coterie.data.preferences_spec import PreferenceSpec
from coterie.errors import CoterieError

ANSWERS = ("chosen", "rejected")
REMEDY = "Name the record's fields prompt, chosen and rejected: the run file cannot rename them."


@dataclass(frozen=True)
class Preference:
    """The same prompt with either answer; both are of one kind."""

    chosen: Instruction | Conversation
    rejected: Instruction | Conversation

    @property
    def text(self) -> str:
        """The prompt and both answers."""
        return f"{self.chosen.text}\n{self.rejected.answer}"

    @property
    def content(self) -> tuple[str, ...]:
        """The record's own texts: the prompt and both answers."""
        return (*self.chosen.content, self.rejected.answer)


def preferences(records: Sequence[Record], spec: PreferenceSpec) -> list[Preference]:
    """The preference of every record, in their order.

    Raises CoterieError, naming the record, if it lacks a field, if a text or a list of messages is
    empty or wrong, if its answers are equal, or if their prompts differ.
    """
    return [_preference(replace(record, remedy=REMEDY), spec) for record in records]


def preferences_by_split(
    records: Mapping[str, Sequence[Record]], spec: PreferenceSpec
) -> dict[str, list[Preference]]:
    """Each split's preferences."""
    return {split: preferences(part, spec) for split, part in records.items()}


def _preference(record: Record, spec: PreferenceSpec) -> Preference:
    whole = [_is_whole(record[field]) for field in ANSWERS]
    prompt = record.fields.get("prompt")
    if any(whole) or isinstance(prompt, list) or isinstance(record["chosen"], list):
        found = _conversations(record, prompt, all(whole))
    else:
        text, answers = _text(record, "prompt"), [_text(record, field) for field in ANSWERS]
        if spec.template == "chat":
            turns = [Turn("user", text)]
            found = [_conversation(record, turns, answer) for answer in answers]
        else:
            found = [Instruction(text, a.strip(), where=record.where) for a in answers]
    chosen, rejected = found
    if chosen == rejected:
        raise CoterieError(
            f"{record.where}: chosen and rejected are the same answer; correct or remove the "
            "record."
        )
    return Preference(chosen, rejected)


def _conversations(record: Record, prompt: Any, whole: bool) -> list[Conversation]:
    """Both conversations of a record with messages; `whole`: its answers begin with the prompt."""
    if not whole:
        asked = [Turn("user", _text(record, "prompt"))] if isinstance(prompt, str) else None
        turns = turns_of(record, "prompt") if asked is None else asked
        return [_conversation(record, turns, _answer(record, field)) for field in ANSWERS]
    chosen, rejected = (turns_of(record, field) for field in ANSWERS)
    before = chosen[:-1]
    if isinstance(prompt, list):
        alike = turns_of(record, "prompt") == before
    else:  # some data sets repeat what the user asks
        alike = prompt is None or prompt in (turn.content for turn in before)
    if before != rejected[:-1] or not alike:
        raise CoterieError(
            f"{record.where}: chosen and rejected answer different prompts; they must begin with "
            "the same turns, and differ in the last one alone."
        )
    return [_conversation(record, before, _said(record, t[-1:])) for t in (chosen, rejected)]


def _is_whole(answer: Any) -> bool:
    """Whether it is a conversation from its beginning, and not an answer alone."""
    return isinstance(answer, list) and len(answer) > 1


def _conversation(record: Record, turns: Sequence[Turn], answer: str) -> Conversation:
    if not turns or turns[-1].role != "user":
        raise CoterieError(
            f"{record.where}: the prompt does not end with a turn of the user's; correct it or "
            "remove the record."
        )
    return Conversation((*turns, Turn("assistant", answer.strip())), record.where)


def _answer(record: Record, field: str) -> str:
    """An answer, as a text or as a list of the assistant's turn."""
    if isinstance(record[field], list):
        return _said(record, turns_of(record, field))
    return _text(record, field)


def _said(record: Record, turns: Sequence[Turn]) -> str:
    if len(turns) != 1 or turns[0].role != "assistant":
        raise CoterieError(
            f"{record.where}: an answer must be one turn of the assistant's, the last of its "
            "conversation."
        )
    return turns[0].content


def _text(record: Record, field: str) -> str:
    """A field's text, which is not blank."""
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise CoterieError(
            f"{record.where}: field {field} contains {value!r:.60}, not a text or a list of "
            "messages; fix or remove the record."
        )
    return record.text([field])

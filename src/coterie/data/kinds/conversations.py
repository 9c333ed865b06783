"""Conversations: lists of messages, in OpenAI's form or in ShareGPT's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

from coterie.data.examples import Encoding, Examples, Sample, samples_of
from coterie.data.files import Record
from coterie.data.items import Conversation, Turn
from coterie.data.parts import PartEncoder
from coterie.data.spec import MessagesSpec
from coterie.errors import CoterieError

FIELDS = ("messages", "conversations")
FORMS = {"role": "content", "from": "value"}
"""The keys of a turn: who speaks, and what is said."""
ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
}
TOOLS = ("tool_calls", "function_call", "tools", "functions")
TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
THINKING = ("reasoning_content", "thinking", "reasoning")
NO_TOOLS = "calls of tools cannot be learned; remove the record"


class Messages(MessagesSpec):
    """Lists of messages."""

    def used(self) -> set[str]:
        """Return the fields that may contain the list."""
        return {self.field} if self.field else set(FIELDS)

    def items(self, records: Sequence[Record]) -> list[Conversation]:
        """Return the conversation of every record."""
        return conversations(records, self)

    def encode(self, items: Sequence[Conversation], how: Encoding) -> Examples:
        """Return the conversations as tokens."""
        return chats(items, how)


def conversations(records: Sequence[Record], spec: MessagesSpec) -> list[Conversation]:
    """The conversation of every record, in their order; what follows the last answer is left out.

    Raises CoterieError, naming the record, if it holds anything but a system prompt, which comes
    first, and what a user and an assistant say in text.
    """
    return [_conversation(record, spec.field) for record in records]


def _conversation(record: Record, field: str | None) -> Conversation:
    if field is None:
        field = next((name for name in FIELDS if record.fields.get(name) is not None), FIELDS[0])
    turns = turns_of(record, field)
    while turns and turns[-1].role != "assistant":
        turns.pop()
    if not turns:
        raise CoterieError(
            f"{record.where}: the conversation has no answer of the assistant's; add one or remove "
            "the record."
        )
    return Conversation(tuple(turns), record.where)


def turns_of(record: Record, field: str) -> list[Turn]:
    """The turns that a field of a record lists; raises CoterieError as `conversations` does."""
    messages = record[field]
    if not isinstance(messages, list):
        wanted = "a list of turns; fix the record or name another field"
        raise record.unfit(field, messages, wanted)
    if not messages:
        raise CoterieError(
            f"{record.where}: field {field} is an empty list; add turns or remove the record."
        )
    for key in TOOLS:
        if not is_nothing(record.fields.get(key)):
            raise CoterieError(f"{record.where} has a field {key}: {NO_TOOLS}.")
    if not is_nothing(record.fields.get("system")):
        raise CoterieError(
            f"{record.where} has a system prompt in the field system, outside the conversation; "
            "put it into the first turn."
        )
    turns: list[Turn] = []
    for number, turn in enumerate(messages, start=1):
        where = f"{record.where}: turn {number}"
        turns.append(_turn(where, turn))
        if turns[-1].role == "system" and number > 1:
            _refuse(where, "is a system prompt; only the first turn may be one")
    return turns


def _turn(where: str, turn: Any) -> Turn:
    if not isinstance(turn, Mapping):
        _refuse(where, f"is {turn!r:.60}, not a mapping such as {{role: user, content: Hello}}")
    held = {key: value for key, value in turn.items() if not is_nothing(value)}
    speaker = "from" if "from" in held else "role"
    said = FORMS[speaker]
    role, content = held.pop(speaker, None), held.pop(said, "")
    if role is None:
        _refuse(where, "has no role, which says who speaks; add one")
    if role in TOOL_ROLES:
        _refuse(where, f"has the role {role}: {NO_TOOLS}")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(where, f"has {role!r:.40} as {speaker}, not one of {', '.join(ROLES)}; correct it")
    for key in held:
        if key in TOOLS:
            why = NO_TOOLS
        elif key in THINKING:
            why = f"put thinking at the beginning of {said}, as <think>...</think>"
        elif content == "":
            why = f"what is said belongs in the key {said}"
        else:
            why = "Coterie does not use it; remove it"
        _refuse(where, f"has the key {key}: {why}")
    found = Turn(ROLES[role], _text(where, said, content))
    if found.role != "system" and not found.answer:
        whose = "answer" if found.role == "assistant" else "turn of the user's"
        _refuse(where, f"is an empty {whose}; correct or remove the record")
    return found


def _text(where: str, key: str, content: Any) -> str:
    """What is said, as a text or in parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            why = (
                f"has a part of type {kind!r:.40} in {key}; only text can be learned, so remove it"
            )
            _refuse(where, why)
        held = {name for name, value in part.items() if not is_nothing(value)} - {"type", "text"}
        if held or not isinstance(part.get("text"), str):
            why = f"the key {min(held)}" if held else f"{part.get('text')!r:.40}, not text,"
            _refuse(where, f"has {why} in {key}; fix or remove it")
        texts.append(part["text"])
    return Record(where, {key: "".join(texts)}).text([key])


def is_nothing(value: Any) -> bool:
    """Whether a key's value says no more than if the key were not there."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _refuse(turn: str, why: str) -> NoReturn:
    raise CoterieError(f"{turn} {why}.")


def chats(items: Sequence[Conversation], how: Encoding) -> Examples:
    """The conversations as tokens, as their template renders them.

    Conversations of more than window + 1 tokens are cut before a turn of the user's into several,
    which all begin with the system prompt; exchanges that are too long are dropped and counted.
    Raises CoterieError if none is left.
    """
    ids_of, template, limit = PartEncoder(how.encoder).ids, how.template, how.limit
    assert template is not None, "as for all conversations"
    chosen: list[Sample] = []
    cut = too_long = 0

    def read(item: Conversation) -> Sample | None:
        """The conversation with its tokens, unless it is too long."""
        rendered = template.rendered(item)
        texts, said = zip(*rendered.parts, strict=True)
        ids = ids_of(texts)
        ids[0] = ids[0] or [how.ends[0]]  # an answer that nothing comes before
        sample = Sample(list(zip(ids, said, strict=True)), item, rendered.bytes)
        return sample if sample.tokens <= how.window + 1 else None

    for item in items:
        if limit is not None and len(chosen) >= limit:
            break
        pieces, lost = _cut(item, read)
        cut, too_long = cut + (len(pieces) > 1), too_long + lost
        chosen += pieces
    if not chosen:
        fitting = f"conversation with an exchange of at most {how.window + 1} tokens"
        raise how.nothing(items, f"{fitting}; raise data.window", "conversations; add some")
    return samples_of(chosen[:limit], too_long, cut, template)


def _cut(
    item: Conversation, read: Callable[[Conversation], Sample | None]
) -> tuple[list[Sample], int]:
    """A conversation in pieces that fit, each as long as it can be; and how many exchanges do
    not."""
    if whole := read(item):
        return [whole], 0
    system, exchanges = item.exchanges()
    pieces: list[Sample] = []
    lost = 0
    turns: tuple[Turn, ...] = ()  # of the last piece, if the next exchange follows them
    for exchange in exchanges:
        if turns and (longer := read(replace(item, turns=turns + exchange))):
            pieces[-1] = longer
            turns += exchange
        elif piece := read(replace(item, turns=system + exchange)):
            pieces.append(piece)
            turns = system + exchange
        else:
            lost += 1
            turns = ()
    return pieces, lost

"""Conversations: lists of messages in the format of OpenAI or of ShareGPT."""

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
"""The record fields that may contain the list of turns. The first field with a value is used."""
FORMS = {"role": "content", "from": "value"}
"""A mapping from each key that can contain a turn's role to the key of the turn's content.

OpenAI uses the keys `role` and `content`, and ShareGPT uses the keys `from` and `value`.
"""
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
NO_TOOLS = "tool calls are not supported; remove the record"


class Messages(MessagesSpec):
    """Conversations as lists of messages."""

    def used(self) -> set[str]:
        return {self.field} if self.field else set(FIELDS)

    def items(self, records: Sequence[Record]) -> list[Conversation]:
        return conversations(records, self)

    def encode(self, items: Sequence[Conversation], how: Encoding) -> Examples:
        return chats(items, how)


def conversations(records: Sequence[Record], spec: MessagesSpec) -> list[Conversation]:
    """Read the conversation of every record, up to the last answer of the conversation.

    Raises:
        CoterieError: A record has no answer by the assistant, or contains an invalid turn. Valid
            turns are texts by the user or the assistant. The first turn can be a system prompt.
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
            f"{record.where}: the conversation has no turn of the assistant; add an answer or "
            "remove the record."
        )
    return Conversation(tuple(turns), record.where)


def turns_of(record: Record, field: str) -> list[Turn]:
    """Read the list of turns in a field of a record.

    Raises:
        CoterieError: The field does not contain a list of valid turns, or the record contains tool
            calls, or the record contains a system prompt outside the list.
    """
    messages = record[field]
    if not isinstance(messages, list):
        expected = "a list of turns; fix the record or name another field"
        raise record.unfit(field, messages, expected)
    if not messages:
        raise CoterieError(
            f"{record.where}: field {field} is an empty list; add turns or remove the record."
        )
    for key in TOOLS:
        if not is_nothing(record.fields.get(key)):
            raise CoterieError(f"{record.where} has the field {key}: {NO_TOOLS}.")
    if not is_nothing(record.fields.get("system")):
        raise CoterieError(
            f'{record.where} has a system prompt in the field "system", not in the conversation; '
            "move it to the first turn of the conversation."
        )
    turns: list[Turn] = []
    for number, turn in enumerate(messages, start=1):
        where = f"{record.where}: turn {number}"
        turns.append(_turn(where, turn))
        if turns[-1].role == "system" and number > 1:
            _refuse(where, "is a system prompt; only the first turn can be a system prompt")
    return turns


def _turn(where: str, turn: Any) -> Turn:
    if not isinstance(turn, Mapping):
        _refuse(where, f'is {turn!r:.60}, not a mapping like {{"role": "user", "content": "Hi"}}')
    values = {key: value for key, value in turn.items() if not is_nothing(value)}
    role_key = "from" if "from" in values else "role"
    content_key = FORMS[role_key]
    role, content = values.pop(role_key, None), values.pop(content_key, "")
    if role is None:
        _refuse(where, f'has no role; add the key "role" with one of the values {", ".join(ROLES)}')
    if role in TOOL_ROLES:
        _refuse(where, f"has the role {role}: {NO_TOOLS}")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(
            where,
            f"has {role!r:.40} under the key {role_key}, but the role must be one of "
            f"{', '.join(ROLES)}; correct it",
        )
    for key in values:
        if key in TOOLS:
            why = NO_TOOLS
        elif key in THINKING:
            why = f"move the thinking to the beginning of {content_key}, as <think>...</think>"
        elif content == "":
            why = f"move the turn's text to the key {content_key}"
        else:
            why = "Coterie does not use it; remove it"
        _refuse(where, f"has the key {key}: {why}")
    result = Turn(ROLES[role], _text(where, content_key, content))
    if result.role != "system" and not result.answer:
        noun = "answer" if result.role == "assistant" else "turn of the user"
        _refuse(where, f"is an empty {noun}; correct or remove the record")
    return result


def _text(where: str, key: str, content: Any) -> str:
    """Return the text of a turn, whose content is a string or a list of text parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            why = f"has a part of type {kind!r:.40} in {key}; only text is supported, so remove it"
            _refuse(where, why)
        extra = {name for name, value in part.items() if not is_nothing(value)} - {"type", "text"}
        if extra or not isinstance(part.get("text"), str):
            why = f"the key {min(extra)}" if extra else f"{part.get('text')!r:.40}, not text,"
            _refuse(where, f"has {why} in {key}; fix or remove it")
        texts.append(part["text"])
    return Record(where, {key: "".join(texts)}).text([key])


def is_nothing(value: Any) -> bool:
    """Return whether a value is None or an empty string, list or mapping.

    Callers treat a key or a field with such a value as missing.
    """
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def _refuse(turn: str, why: str) -> NoReturn:
    raise CoterieError(f"{turn} {why}.")


def chats(items: Sequence[Conversation], how: Encoding) -> Examples:
    """Encode conversations as the chat template renders them.

    A conversation of more than window + 1 tokens is cut into several samples. Each sample consists
    of the system prompt, if there is one, and of consecutive exchanges. An exchange consists of
    user turns and the assistant's answers to these turns. An exchange is left out if it is too long
    even for a sample that consists only of the system prompt and this exchange. The field
    `Examples.too_long` is the number of exchanges that were left out.

    Raises:
        CoterieError: No sample is left.
    """
    ids_of, template, limit = PartEncoder(how.encoder).ids, how.template, how.limit
    assert template is not None, "a conversation needs a chat template"
    chosen: list[Sample] = []
    cut = too_long = 0

    def encode(item: Conversation) -> Sample | None:
        """Return a conversation as a sample, or None if the sample exceeds window + 1 tokens."""
        rendered = template.rendered(item)
        texts, are_answers = zip(*rendered.parts, strict=True)
        ids = ids_of(texts)
        ids[0] = ids[0] or [how.ends[0]]  # no text before the first answer
        sample = Sample(list(zip(ids, are_answers, strict=True)), item, rendered.bytes)
        return sample if sample.tokens <= how.window + 1 else None

    for item in items:
        if limit is not None and len(chosen) >= limit:
            break
        pieces, lost = _cut(item, encode)
        cut, too_long = cut + (len(pieces) > 1), too_long + lost
        chosen += pieces
    if not chosen:
        fitting = (
            "conversation in which a question, its answer and the system prompt (if any) together "
            f"have at most {how.window + 1} tokens"
        )
        raise how.nothing(items, f"{fitting}; raise data.window", "conversations; add some")
    return samples_of(chosen[:limit], too_long, cut, template)


def _cut(
    item: Conversation, encode: Callable[[Conversation], Sample | None]
) -> tuple[list[Sample], int]:
    """Cut a conversation into samples that fit the window, each as long as possible.

    A conversation is cut only between exchanges.

    Returns:
        The samples, and the number of exchanges left out because they are too long for a sample.
    """
    if sample := encode(item):
        return [sample], 0
    system, exchanges = item.exchanges()
    pieces: list[Sample] = []
    lost = 0
    turns: tuple[Turn, ...] = ()  # the last piece's turns, if the next exchange may extend it
    for exchange in exchanges:
        if turns and (longer := encode(replace(item, turns=turns + exchange))):
            pieces[-1] = longer
            turns += exchange
        elif piece := encode(replace(item, turns=system + exchange)):
            pieces.append(piece)
            turns = system + exchange
        else:
            lost += 1
            turns = ()
    return pieces, lost

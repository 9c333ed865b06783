"""Items of training data as text: instructions, conversations, and rankings of answers."""

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


class Item(Protocol):
    """An immutable value that represents a record of any kind of data except plain text."""

    @property
    def text(self) -> str:
        """The prompt with all answers. Items with equal texts are exact duplicates."""
        ...

    @property
    def content(self) -> tuple[str, ...]:
        """The texts that the record contains, without the words that a template adds."""
        ...

    @property
    def where(self) -> str:
        """The record's location in error messages."""
        ...


@dataclass(frozen=True)
class Instruction:
    """A prompt with its right answer."""

    prompt: str
    """The prompt as the model reads it."""
    answer: str
    """The right answer."""
    choices: tuple[str, ...] = ()
    """The answers to choose from, if any."""
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The values of the fields from which a template rendered the prompt and the answer."""
    where: str = field(default="The sample", compare=False, repr=False)
    """The record's location in error messages, such as "Client anna: line 3 of notes.jsonl"."""

    @property
    def text(self) -> str:
        """The prompt and the answer."""
        return f"{self.prompt}\n{self.answer}"

    @property
    def parts(self) -> tuple[str, str]:
        """The prompt and the answer as they are encoded, with a space before the answer.

        Tokenizers join a space to the word that follows, so the space is part of the answer. There
        is no space after a prompt that is empty or ends with a newline.
        """
        prompt = self.prompt.rstrip(" ")
        between = "" if prompt.endswith("\n") or not prompt else " "
        return prompt, between + self.answer

    @property
    def content(self) -> tuple[str, ...]:
        """The texts that the record contains, without the words that a template adds.

        These are the values of the fields from which a template rendered the instruction. If no
        template was used, they are the prompt and the answer.
        """
        return self.fields or (self.prompt, self.answer)


class Turn(NamedTuple):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str

    @property
    def answer(self) -> str:
        """The content without the assistant's thinking and without surrounding white space."""
        return (parted(self.content)[1] if self.role == "assistant" else self.content).strip()


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends with a turn of the assistant."""

    turns: tuple[Turn, ...]
    where: str = "The conversation"
    """The record's location in error messages, such as "Client anna: line 3 of chats.jsonl"."""
    choices: tuple[str, ...] = ()
    """The choices for the last answer, if any."""
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The values of the fields from which a template rendered the turns."""

    @property
    def answer(self) -> str:
        """The assistant's last answer; thinking that precedes the answer is left out."""
        return self.turns[-1].answer

    @property
    def text(self) -> str:
        """The contents of all turns."""
        return "\n".join(turn.content for turn in self.turns)

    @property
    def content(self) -> tuple[str, ...]:
        """The texts that the record contains, without the words that a template adds.

        These are the values of the fields from which a template rendered the conversation. If no
        template was used, there is one text per role (system, user, assistant), which joins the
        contents of all turns of that role.
        """
        return self.fields or tuple(
            "\n".join(turn.content for turn in self.turns if turn.role == role)
            for role in ("system", "user", "assistant")
        )

    def exchanges(self) -> tuple[tuple[Turn, ...], list[tuple[Turn, ...]]]:
        """Divide the conversation into exchanges between the user and the assistant.

        An exchange consists of one or more user turns and the assistant's answers to these turns.
        If the conversation begins with an answer, the first exchange has no user turn.

        Returns:
            A tuple and a list. The tuple contains the system prompt, and is empty if there is no
            system prompt. The list contains the exchanges.
        """
        first = 1 if self.turns[0].role == "system" else 0
        parts: list[tuple[Turn, ...]] = []
        start = first
        for end in range(first + 1, len(self.turns) + 1):
            next_role = self.turns[end].role if end < len(self.turns) else "user"
            if self.turns[end - 1].role == "assistant" and next_role != "assistant":
                parts.append(self.turns[start:end])
                start = end
        return self.turns[:first], parts


@dataclass(frozen=True)
class Ranking:
    """A prompt with several answers, ranked from best to worst."""

    answers: tuple[Instruction | Conversation, ...]
    """The prompt with each of the answers, from the best answer to the worst.

    Either all elements are instructions, or all elements are conversations.
    """

    @property
    def where(self) -> str:
        """The record's location in error messages."""
        return self.answers[0].where

    @property
    def text(self) -> str:
        """The prompt and all answers."""
        return "\n".join([self.answers[0].text, *(item.answer for item in self.answers[1:])])

    @property
    def content(self) -> tuple[str, ...]:
        """The texts that the record contains, without the words that a template adds.

        The tuple begins with the texts in `answers[0].content`, which come from the prompt and the
        best answer. Every other answer follows as one more text.
        """
        return (*self.answers[0].content, *(item.answer for item in self.answers[1:]))


def parted(content: str) -> tuple[str | None, str]:
    """Split an answer into its initial thinking and the remaining text.

    If the answer does not begin with thinking, the thinking is None.
    """
    match = _THINKING.fullmatch(content)
    return (match[1].strip(), match[2]) if match else (None, content)

"""What a model learns from: an instruction, a conversation, or a ranking of answers."""

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


class Item(Protocol):
    """What a record of any kind becomes, except plain text."""

    @property
    def text(self) -> str:
        """The prompt and the answers, by which copies are found."""
        ...

    @property
    def content(self) -> tuple[str, ...]:
        """The record's own texts, without a template."""
        ...

    @property
    def where(self) -> str:
        """The record's place for errors."""
        ...


@dataclass(frozen=True)
class Instruction:
    """A prompt as the model sees it, the answer wanted, and the answers to choose from, if any."""

    prompt: str
    answer: str
    choices: tuple[str, ...] = ()
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The fields of the record that made the prompt and the answer, where a template did."""
    where: str = field(default="The sample", compare=False, repr=False)
    """The record's place for errors, such as "Client anna: line 3 of notes.jsonl"."""

    @property
    def text(self) -> str:
        """Prompt and answer."""
        return f"{self.prompt}\n{self.answer}"

    @property
    def parts(self) -> tuple[str, str]:
        """Prompt and answer as they are encoded: a space between them belongs to the answer.

        Tokenizers join a space to the word after it. A prompt that ends with a line break needs
        none.
        """
        prompt = self.prompt.rstrip(" ")
        between = "" if prompt.endswith("\n") or not prompt else " "
        return prompt, between + self.answer

    @property
    def content(self) -> tuple[str, ...]:
        """The record's own texts, without the template."""
        return self.fields or (self.prompt, self.answer)


class Turn(NamedTuple):
    """What somebody said."""

    role: Literal["system", "user", "assistant"]
    content: str

    @property
    def answer(self) -> str:
        """What is said, without the thinking that an assistant may begin with, and the space around
        it."""
        return (parted(self.content)[1] if self.role == "assistant" else self.content).strip()


@dataclass(frozen=True)
class Conversation:
    """Turns, of which the assistant's last is the last.

    where: for errors, such as "Client anna: line 3 of chats.jsonl".
    """

    turns: tuple[Turn, ...]
    where: str = "The conversation"
    choices: tuple[str, ...] = ()
    """Answers to choose the last from, if any."""
    fields: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The fields of the record that made the turns, where a template did."""

    @property
    def answer(self) -> str:
        """What the assistant says last."""
        return self.turns[-1].answer

    @property
    def text(self) -> str:
        """All that is said."""
        return "\n".join(turn.content for turn in self.turns)

    @property
    def content(self) -> tuple[str, ...]:
        """The record's fields; elsewhere what the system prompt, the user and the assistant say."""
        return self.fields or tuple(
            "\n".join(turn.content for turn in self.turns if turn.role == role)
            for role in ("system", "user", "assistant")
        )

    def exchanges(self) -> tuple[tuple[Turn, ...], list[tuple[Turn, ...]]]:
        """The system prompt, if any, and the turns in parts that each end with an answer."""
        first = 1 if self.turns[0].role == "system" else 0
        parts: list[tuple[Turn, ...]] = []
        start = first
        for end in range(first + 1, len(self.turns) + 1):
            after = self.turns[end].role if end < len(self.turns) else "user"
            if self.turns[end - 1].role == "assistant" and after != "assistant":
                parts.append(self.turns[start:end])
                start = end
        return self.turns[:first], parts


@dataclass(frozen=True)
class Ranking:
    """The same prompt with several answers, the best first; all are of one kind."""

    answers: tuple[Instruction | Conversation, ...]

    @property
    def where(self) -> str:
        """The record's place for errors."""
        return self.answers[0].where

    @property
    def text(self) -> str:
        """The prompt and all answers."""
        return "\n".join([self.answers[0].text, *(item.answer for item in self.answers[1:])])

    @property
    def content(self) -> tuple[str, ...]:
        """The record's own texts: the prompt and all answers."""
        return (*self.answers[0].content, *(item.answer for item in self.answers[1:]))


def parted(content: str) -> tuple[str | None, str]:
    """The thinking that an answer begins with, if there is any, and the rest."""
    found = _THINKING.fullmatch(content)
    return (found[1].strip(), found[2]) if found else (None, content)

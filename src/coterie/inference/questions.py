"""General questions, which show what a model has kept of what its base knew."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml
from transformers import PreTrainedModel

from coterie.bases import Base
from coterie.data.chat import ChatTemplate, chat_template
from coterie.data.examples import Encoding, Examples
from coterie.data.files import Record
from coterie.data.items import Conversation, Instruction, Turn
from coterie.data.kinds.conversations import chats
from coterie.data.kinds.instructions import examples
from coterie.data.parts import bare_encoder
from coterie.data.spec import DataSpec
from coterie.evaluation.accuracy import ACCURACY
from coterie.evaluation.evaluate import ModelScorer
from coterie.evaluation.gate import Gate, gated_answers
from coterie.files import read_file
from coterie.inference.asking import as_items

SHIPPED = Path(__file__).parents[1] / "assets" / "general" / "questions.yaml"
"""The questions that ship with Coterie."""
CHOICES = 4
"""The number of answers to choose from."""
REPLY = 20
"""The maximum number of tokens of a free reply."""
BATCH = 64
"""The number of prompts per forward pass."""
UNLIMITED = 2**20
"""A window that no sample exceeds."""


class Question(NamedTuple):
    """A question about general knowledge."""

    text: str
    answer: str
    choices: tuple[str, ...]
    """The answer, and the wrong answers from which a model must tell it."""
    is_free: bool
    """Whether the model also answers the question freely."""


@dataclass(frozen=True)
class Knowledge:
    """A model's answers to general questions."""

    right_choices: float
    """The fraction of questions whose right answer is more likely than the wrong ones."""
    right_replies: float
    """The fraction of free replies that contain the right answer."""
    replies: tuple[str, ...]
    """The free replies, in the order of the questions."""


@cache
def questions(file: Path = SHIPPED) -> tuple[Question, ...]:
    """Read questions from a file of the form of `assets/general/questions.yaml`."""
    kinds: list[Any] = yaml.safe_load(read_file(file))
    return tuple(question for kind in kinds for question in _of_kind(**kind))


def _of_kind(question: str, free: int, answers: dict[str, str]) -> list[Question]:
    values = list(answers.values())
    return [
        Question(
            question.format(name),
            answer,
            tuple(dict.fromkeys(values[number:] + values[:number]))[:CHOICES],
            number < free,
        )
        for number, (name, answer) in enumerate(answers.items())
    ]


def knowledge(
    base: Base,
    model: PreTrainedModel,
    data: DataSpec,
    asked: Sequence[Question],
    gate: Gate | None = None,
) -> Knowledge:
    """Ask a model questions.

    Args:
        base: The base of the model.
        model: The model.
        data: The run's data, which are instructions or conversations.
        asked: The questions.
        gate: The client's gate; None if the model answers all requests.
    """
    template = chat_template(base.tokenizer, data.chat_template) if data.chats else None
    items = in_form(data, template, [question.text for question in asked])
    pairs = zip(items, asked, strict=True)
    split = encoded(
        base,
        [replace(answered(item, q.answer), choices=q.choices) for item, q in pairs],
        template,
    )
    measured, _ = split.measured(ModelScorer(base, model, UNLIMITED, BATCH, gate=gate))
    right = ACCURACY.score(measured)
    free = [number for number, question in enumerate(asked) if question.is_free]
    replies = gated_answers(gate, base, model, split.only(free), REPLY, BATCH)
    are_right = [says(reply, asked[n].answer) for n, reply in zip(free, replies, strict=True)]
    return Knowledge(fmean(value or 0.0 for value in right), fmean(are_right), tuple(replies))


def says(reply: str, answer: str) -> bool:
    """Return whether a reply contains an answer as a word, or as several words."""
    return re.search(rf"\b{re.escape(answer)}\b", reply, re.IGNORECASE) is not None


def in_form(
    data: DataSpec, template: ChatTemplate | None, requests: Sequence[str]
) -> Sequence[Instruction] | Sequence[Conversation]:
    """Return requests in the form of a run's prompts, with "A" in place of the answers.

    Args:
        data: The run's data.
        template: The chat template of the run's conversations; None if it has none.
        requests: The requests.
    """
    if template is not None:
        turns = [(Turn("user", request), Turn("assistant", "A")) for request in requests]
        return [Conversation(pair, "A general request") for pair in turns]
    if data.instructions is None:
        return [Instruction(request, "A") for request in requests]
    return as_items(data, [Record("A general request", {"question": r}) for r in requests])


def answered(item: Instruction | Conversation, answer: str) -> Instruction | Conversation:
    """Return an item with another answer."""
    if isinstance(item, Instruction):
        return replace(item, answer=answer)
    return replace(item, turns=(*item.turns[:-1], Turn("assistant", answer)))


def encoded(base: Base, items: Sequence[Any], template: ChatTemplate | None) -> Examples:
    """Encode items of the form that `in_form` returns."""
    encoder, end = bare_encoder(base.tokenizer)
    ends = base.context_token, end
    how = Encoding(encoder, ends, UNLIMITED, None, "The general requests", template)
    return examples(items, how) if template is None else chats(items, how)

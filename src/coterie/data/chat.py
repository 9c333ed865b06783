"""Chat templates: rendering conversations, and locating the assistant's answers in the result.

Templates are used as published. Many templates drop the thinking of earlier answers, strip spaces,
or render the last answer differently from earlier answers. An answer can therefore not be located
by rendering a shorter conversation. Instead, a conversation is rendered twice, the second time with
a mark in place of each answer.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from coterie.data.chat_sandbox import rendered
from coterie.data.items import Conversation, Instruction, Turn, parted
from coterie.data.sandbox import TooCostly
from coterie.errors import CoterieError

TODAY = datetime(2024, 7, 26)
"""The date that templates print as today's date.

The date is constant, so that a resumed run reads the same texts.
"""


_SPACE = re.compile(r"\s*")
_TURN_MARKER = re.compile(r"<[^<>\s]{1,40}>|<<[^<>\s]{1,40}>>|\[/?[A-Z_]{2,40}\]")
_MARK = re.compile("\ue000([ta])([0-9]+)\ue001")
"""A pattern of marks, each of which replaces the thinking (t) or the answer (a) of one turn.

A mark contains the index of the turn among the assistant's turns, counted from 0.
"""


OURS = Path(__file__).parents[1] / "assets" / "chat.jinja"
"""The chat template for bases without a chat template of their own."""
TRIAL = (Turn("user", "Q"), Turn("assistant", "A")) * 2
"""A conversation with two answers, from which a template's markers are read."""


class Rendered(NamedTuple):
    """A rendered conversation, split into answers and the text before each answer."""

    parts: list[tuple[str, bool]]
    """The consecutive parts of the text, each paired with True for an answer and False otherwise.

    The marker that ends an answer is part of the answer.
    """
    bytes: int
    """The total number of UTF-8 bytes of all answers. Markers are not included."""


class ChatTemplate:
    """A chat template, together with a base's tokenizer.

    Args:
        tokenizer: The base's tokenizer, which defines the special tokens.
        source: Jinja text, as in `tokenizer.chat_template`.
        name: The template's name in error messages.

    Raises:
        CoterieError: The template is invalid, omits or repeats an answer, or writes no marker
            between an answer and the next turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, name: str) -> None:
        self.tokenizer, self.source, self.name = tokenizer, source, name
        self.lead, self.inner_end, self.last_end = self._delimiters()

    @property
    def digest(self) -> str:
        """A hash of the template's text."""
        return blake2b(self.source.encode(), digest_size=8).hexdigest()

    def rendered(self, conversation: Conversation) -> Rendered:
        """Render a conversation up to the end of its last answer, and locate the answers.

        A space that the template writes before an answer is part of the answer, because tokenizers
        join the space to the answer's first word. If the template renders the assistant's thinking,
        the thinking is part of the answer.

        Raises:
            CoterieError: The template refuses the conversation, or changes an answer.
        """
        turns, where = conversation.turns, conversation.where
        if "\ue000" in conversation.text:
            raise CoterieError(
                f"{where} contains the character U+E000, which Coterie reserves; remove it."
            )
        text = self._render(turns, where)
        answers = self._answer_spans(text, self._render(_marked(turns), where), turns, where)
        parts: list[tuple[str, bool]] = []
        position = 0
        for number, (start, end) in enumerate(answers, start=1):
            marker = self.inner_end if number < len(answers) else self.last_end
            if not text.startswith(marker, end):
                raise CoterieError(
                    f"{where}: the chat template ({self.name}) ends answers with {marker!r} in "
                    "other conversations, but not in this one; check the order of the turns."
                )
            start -= text[start - 1 : start] == " "
            answer = text[start:end] + (marker or str(self.tokenizer.eos_token))
            parts += [(text[position:start], False), (answer, True)]
            position = end + len(marker)
        return Rendered(parts, sum(len(text[start:end].encode()) for start, end in answers))

    @property
    def around(self) -> tuple[str, str]:
        """The space directly before an answer, and the text that ends the last answer.

        The first text is "" if the template writes no space before an answer. The second text is
        the marker that the template writes after the last answer or, if there is no such marker,
        the end-of-text token.
        """
        return self.lead, self.last_end or str(self.tokenizer.eos_token)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that end answers in a rendered conversation.

        The first text ends the last answer. If another text ends earlier answers, it comes second.
        """
        return tuple(dict.fromkeys((self.around[1], self.inner_end)))

    @property
    def turn_markers(self) -> set[str]:
        """The markers of turns and of roles, such as <|im_start|>, <start_of_turn> or [INST]."""
        rendered = [self._render(TRIAL, "A trial conversation")]
        with suppress(CoterieError):  # some templates refuse system prompts
            rendered.append(self._render((Turn("system", "S"), *TRIAL), "A trial conversation"))
        markers = {marker for text in rendered for marker in _TURN_MARKER.findall(text)}
        return markers.union(map(str.strip, self.markers)) - {"<think>", "</think>"}

    def opening_and_answer(self, turns: Sequence[Turn], thinking: bool = False) -> list[str]:
        """Render turns as a prompt for generation, followed by a placeholder for the answer.

        The prompt is the same text that precedes an answer in training. The template's option
        `add_generation_prompt` is not used, because it makes some templates write a different
        prompt.

        Args:
            turns: The conversation up to the user's last turn.
            thinking: Whether the model may think before it answers. If true, the prompt ends where
                the thinking would begin. Otherwise, it ends where the answer would begin.

        Returns:
            The parts of the prompt, and the placeholder as the last part. The placeholder is
            needed because the tokens at the end of the prompt depend on the text that follows.
        """
        answer = Turn("assistant", "<think>T</think>A" if thinking else "A")
        conversation = Conversation((*turns, answer))
        try:
            return [text for text, _ in self.rendered(conversation).parts]
        except CoterieError:  # an earlier answer cannot be located; other errors are raised again
            *_, last = _marked(conversation.turns)
            text = self._render((*turns, last), conversation.where)
            starts = {mark[1]: mark.start() for mark in _MARK.finditer(text)}
            end = _tag_start(text, starts["t"]) if "t" in starts else starts["a"]
            prompt = text[:end].removesuffix(" ")
            return [prompt, _MARK.sub("A", text[len(prompt) :])]

    def _delimiters(self) -> tuple[str, str, str]:
        """Return the texts that the template writes around answers.

        Returns:
            Three texts. The first text is a space if the template writes a space before an answer,
            and "" otherwise. The second text is the marker between an answer and the next turn. The
            third text is the marker after the last answer, or "" if the template writes no marker
            there. In that case, the end-of-text token must end the last answer.
        """
        where = "A trial conversation"
        marked = self._render(_marked(TRIAL), where)
        (_, first), (_, inner), (_, last) = self._gaps(marked, 2, where)
        lead = " " * first.endswith(" ")
        special_tokens = "|".join(map(re.escape, self.tokenizer.all_special_tokens))
        marker = re.compile(rf"\s*(?:<[^<>\s]{{1,40}}>|{special_tokens})")
        inner_markers, last_markers = (_leading(marker, gap) for gap in (inner, last))
        pairs = zip(inner_markers, last_markers, strict=False)
        common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common:
            return lead, common, common
        if not inner_markers:
            raise CoterieError(
                f"The chat template ({self.name}) writes no marker after an answer, so a model "
                "could not learn where to stop; set data.chat_template to another template."
            )
        return lead, inner_markers[0], "".join(last_markers[:1])

    def _render(self, turns: Sequence[Turn], where: str) -> str:
        values = {
            "messages": [turn._asdict() for turn in turns],
            "add_generation_prompt": False,
            "tools": None,
            "documents": None,
            "strftime_now": TODAY.strftime,
            **self.tokenizer.special_tokens_map,
        }
        try:
            return rendered(self.source, values)
        except TooCostly as error:
            raise CoterieError(
                f"The chat template ({self.name}) {error}; set data.chat_template to another "
                "template."
            ) from error
        except TemplateSyntaxError as error:
            raise CoterieError(
                f"Line {error.lineno} of the chat template ({self.name}) is not valid Jinja: "
                f"{(error.message or '').rstrip('.')}; correct it or set data.chat_template to "
                "another template."
            ) from error
        except Exception as error:  # a template can raise any exception
            raise CoterieError(
                f"{where}: the chat template ({self.name}) refuses the conversation ({error}); "
                "change the conversation or set data.chat_template to another template."
            ) from error

    def _gaps(self, marked: str, answers: int, where: str) -> list[tuple[tuple[str, int], str]]:
        """Split a rendered conversation at the marks that replace answers and thinking.

        Args:
            marked: The conversation rendered with marks; see `_MARK`.
            answers: The number of answers in the conversation.
            where: The conversation's location, for error messages.

        Returns:
            A list of entries ((kind, index), text), one for each mark. The kind is "t" for thinking
            or "a" for an answer. The index counts the assistant's turns from 0. The text stands
            between the mark and the next mark, or after the last mark. The text before the first
            mark has an entry of its own at the start of the list, with the kind "" and the index
            -1.

        Raises:
            CoterieError: The template omits, repeats or changes the mark of an answer.
        """
        first, *rest = _MARK.split(marked)
        marks = [(kind, int(number)) for kind, number in zip(rest[::3], rest[1::3], strict=True)]
        if [number for kind, number in marks if kind == "a"] != list(range(answers)):
            raise CoterieError(
                f"{where}: the chat template ({self.name}) omits, repeats or changes an answer; "
                "set data.chat_template to another template."
            )
        return [(("", -1), first), *zip(marks, rest[2::3], strict=True)]

    def _answer_spans(
        self, text: str, marked: str, turns: Sequence[Turn], where: str
    ) -> list[tuple[int, int]]:
        """Return the start and end of each answer in a rendered conversation.

        If the template renders thinking, an answer includes the thinking before it.

        Args:
            text: The rendered conversation.
            marked: The conversation rendered with marks in place of the answers.
            turns: The conversation's turns.
            where: The conversation's location, for error messages.
        """
        contents = [turn.content for turn in turns if turn.role == "assistant"]
        (_, first), *rest = self._gaps(marked, len(contents), where)
        matches, position = text.startswith(first), len(first)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for (kind, number), gap in rest:
            thinking, answer = parted(contents[number])
            begin = _after_space(text, position)
            expected = thinking or "" if kind == "t" else answer.strip()
            if thinking == "" and text.startswith(contents[number].strip(), begin):
                expected = contents[number].strip()  # a template that leaves empty thinking in
            end = begin + len(expected)
            # White space after an answer is part of it, unless the template writes it.
            candidates = range(_after_space(text, end), end, -1)
            gap_start = next((place for place in candidates if text.startswith(gap, place)), end)
            matches = matches and text.startswith(expected, begin)
            matches = matches and text.startswith(gap, gap_start)
            starts.setdefault(number, _tag_start(text, position) if kind == "t" else position)
            ends[number], position = gap_start, gap_start + len(gap)
        if not matches or position != len(text):
            raise CoterieError(
                f"{where}: the chat template ({self.name}) changes an answer of the assistant, so "
                "the answer cannot be located in the rendered text; change the conversation or set "
                "data.chat_template to another template."
            )
        return [(starts[number], ends[number]) for number in starts]


def chat_template(tokenizer: PreTrainedTokenizerBase, source: str | None) -> ChatTemplate:
    """Return the chat template that a run uses with a base.

    The run file's template takes precedence over the base's template. If there is neither, the
    function returns Coterie's default template.

    Args:
        tokenizer: The base's tokenizer.
        source: The Jinja text of `data.chat_template`, or None if the run file lacks this key.
    """
    if source is not None:
        return ChatTemplate(tokenizer, source, "data.chat_template")
    if tokenizer.chat_template:
        try:
            default = tokenizer.get_chat_template()
        except ValueError as error:  # the base has several templates, none of them the default
            raise CoterieError(
                f"The base {tokenizer.name_or_path} has several chat templates; set "
                "data.chat_template to one of them."
            ) from error
        return ChatTemplate(tokenizer, default, f"from {tokenizer.name_or_path}")
    return ChatTemplate(tokenizer, OURS.read_text(encoding="utf-8"), "Coterie's")


def _marked(turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns with marks in place of all answers and all non-empty thinking."""
    marked: list[Turn] = []
    number = 0
    for turn in turns:
        if turn.role == "assistant":
            thinking, _ = parted(turn.content)
            before = f"<think>\ue000t{number}\ue001</think>" if thinking else ""
            turn = turn._replace(content=f"{before}\ue000a{number}\ue001")
            number += 1
        marked.append(turn)
    return marked


def _after_space(text: str, start: int) -> int:
    """Return the position of the first character at or after `start` that is not white space."""
    space = _SPACE.match(text, start)
    return start if space is None else space.end()


def parts_of(item: Instruction | Conversation, template: ChatTemplate | None) -> Sequence[str]:
    """Return the texts into which a sample is divided for encoding.

    Prompts and answers alternate. The first text is a prompt.

    Args:
        item: The sample.
        template: The chat template; required for a conversation.
    """
    if isinstance(item, Instruction):
        return item.parts
    assert template is not None, "a conversation needs a chat template"
    return [text for text, _ in template.rendered(item).parts]


def _leading(marker: re.Pattern[str], text: str) -> list[str]:
    """Return the consecutive matches of a pattern at the beginning of a text."""
    markers: list[str] = []
    while match := marker.match(text, sum(map(len, markers))):
        markers.append(match[0])
    return markers


def _tag_start(text: str, start: int) -> int:
    """Return the position of a <think> tag directly before `start`, or `start` if there is none."""
    before = text[:start].rstrip()
    return len(before) - len("<think>") if before.endswith("<think>") else start

"""Conversations, and a base's chat template: what of a rendered conversation the assistant said.

Templates are used as published. Many drop earlier thinking, strip spaces, or render an answer
differently once it is the last, so answers are not looked for in shorter conversations: the
conversation is rendered twice, the second time with a mark in place of each answer.
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
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
)

from coterie.data.items import Conversation, Instruction, Turn, parted
from coterie.errors import CoterieError

TODAY = datetime(2024, 7, 26)
"""The date of templates that print today's: a run that is resumed tomorrow must read the same."""


_SPACE = re.compile(r"\s*")
_TURN_MARKER = re.compile(r"<[^<>\s]{1,40}>|<<[^<>\s]{1,40}>>|\[/?[A-Z_]{2,40}\]")
_MARK = re.compile("\ue000([ta])([0-9]+)\ue001")
"""Stands for the thinking or the answer of the assistant's turn of that number."""


OURS = Path(__file__).parents[1] / "assets" / "chat.jinja"
"""The template of bases that have none."""
TRIAL = (Turn("user", "Q"), Turn("assistant", "A")) * 2


class Rendered(NamedTuple):
    """A conversation as a base reads it, in the order of its parts."""

    parts: list[tuple[str, bool]]
    """Texts, and whether the assistant said them (with the marker that ends its turn)."""
    bytes: int
    """UTF-8 bytes of what the assistant said, without markers."""


class ChatTemplate:
    """A chat template, with the tokenizer of the base that it is for.

    source: Jinja, as in `tokenizer.chat_template`. name: for people. Raises CoterieError if nothing
    can be learned with it, and says why.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, name: str) -> None:
        self.tokenizer, self.source, self.name = tokenizer, source, name
        self.lead, self.inner_end, self.last_end = self._around()

    @property
    def digest(self) -> str:
        """A hash of its text."""
        return blake2b(self.source.encode(), digest_size=8).hexdigest()

    def rendered(self, conversation: Conversation) -> Rendered:
        """What a base reads of a conversation, up to the end of its last answer.

        A space that the template writes before an answer counts with it, as tokenizers join it to
        the first word. Thinking counts where the template renders it. Raises CoterieError if the
        template refuses the conversation, or changes what the assistant says.
        """
        turns, where = conversation.turns, conversation.where
        if "\ue000" in conversation.text:
            raise CoterieError(f"{where} contains U+E000, which Coterie uses itself; remove it.")
        text = self._render(turns, where)
        said = self._said(text, self._render(_marked(turns), where), turns, where)
        parts: list[tuple[str, bool]] = []
        done = 0
        for number, (start, end) in enumerate(said, start=1):
            marker = self.inner_end if number < len(said) else self.last_end
            if not text.startswith(marker, end):
                raise CoterieError(
                    f"{where}: the chat template ({self.name}) does not end an answer with "
                    f"{marker!r} as it does in other conversations; check the order of the turns."
                )
            start -= text[start - 1 : start] == " "
            answer = text[start:end] + (marker or str(self.tokenizer.eos_token))
            parts += [(text[done:start], False), (answer, True)]
            done = end + len(marker)
        return Rendered(parts, sum(len(text[start:end].encode()) for start, end in said))

    @property
    def around(self) -> tuple[str, str]:
        """What stands before and after a last answer in its part of `rendered`."""
        return self.lead, self.last_end or str(self.tokenizer.eos_token)

    @property
    def markers(self) -> tuple[str, ...]:
        """What ends answers, the last and, where that is another, those before."""
        return tuple(dict.fromkeys((self.around[1], self.inner_end)))

    @property
    def turn_markers(self) -> set[str]:
        """Return the marks of turns and speakers: <|im_start|>, <start_of_turn> or [INST]."""
        rendered = [self._render(TRIAL, "A trial conversation")]
        with suppress(CoterieError):  # some templates refuse system prompts
            rendered.append(self._render((Turn("system", "S"), *TRIAL), "A trial conversation"))
        found = {marker for text in rendered for marker in _TURN_MARKER.findall(text)}
        return found.union(map(str.strip, self.markers)) - {"<think>", "</think>"}

    def opening_and_answer(self, turns: Sequence[Turn], thinking: bool = False) -> list[str]:
        """What a base reads before it answers these turns, in parts, and last an answer that stands
        for any, as the tokens at the end of a text depend on what follows it.

        Before it thinks, with `thinking`. It is what `rendered` gives before the answer, which in
        some templates is not what they write with `add_generation_prompt`.
        """
        answer = Turn("assistant", "<think>T</think>A" if thinking else "A")
        whole = Conversation((*turns, answer))
        try:
            return [text for text, _ in self.rendered(whole).parts]
        except CoterieError:  # what a model said before cannot be found; else it is raised again
            *_, last = _marked(whole.turns)
            text = self._render((*turns, last), whole.where)
            at = {mark[1]: mark.start() for mark in _MARK.finditer(text)}
            before = text[: _tag(text, at["t"]) if "t" in at else at["a"]].removesuffix(" ")
            return [before, _MARK.sub("A", text[len(before) :])]

    def _around(self) -> tuple[str, str, str]:
        """A space before answers, or none; what ends them inside a conversation, and at its end
        ("": the end of text)."""
        where = "A trial conversation"
        marked = self._render(_marked(TRIAL), where)
        (_, first), (_, inner), (_, last) = self._gaps(marked, 2, where)
        lead = " " * first.endswith(" ")
        known = "|".join(map(re.escape, self.tokenizer.all_special_tokens))
        marker = re.compile(rf"\s*(?:<[^<>\s]{{1,40}}>|{known})")
        inside, at_end = (_leading(marker, gap) for gap in (inner, last))
        pairs = zip(inside, at_end, strict=False)
        same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same:
            return lead, same, same
        if not inside:
            raise CoterieError(
                f"The chat template ({self.name}) writes no marker after an answer, so a model "
                "could not learn where to stop; give another data.chat_template."
            )
        return lead, inside[0], "".join(at_end[:1])

    def _render(self, turns: Sequence[Turn], where: str) -> str:
        messages = [turn._asdict() for turn in turns]
        try:
            return _compile_jinja_template(self.source).render(
                messages=messages,
                add_generation_prompt=False,
                tools=None,
                documents=None,
                strftime_now=TODAY.strftime,
                **self.tokenizer.special_tokens_map,
            )
        except TemplateSyntaxError as error:
            raise CoterieError(
                f"The chat template ({self.name}) is not valid Jinja, line {error.lineno}: "
                f"{(error.message or '').rstrip('.')}; correct it or give another "
                "data.chat_template."
            ) from error
        except Exception as error:  # whatever a template can raise
            raise CoterieError(
                f"{where}: the chat template ({self.name}) refuses it ({error}); change the "
                "conversation or give another data.chat_template."
            ) from error

    def _gaps(self, marked: str, answers: int, where: str) -> list[tuple[tuple[str, int], str]]:
        """Each mark's kind and number with the text after it; first, the text before all marks."""
        first, *rest = _MARK.split(marked)
        marks = [(kind, int(number)) for kind, number in zip(rest[::3], rest[1::3], strict=True)]
        if [number for kind, number in marks if kind == "a"] != list(range(answers)):
            raise CoterieError(
                f"{where}: the chat template ({self.name}) does not write every answer once, "
                "word for word; give another data.chat_template."
            )
        return [(("", -1), first), *zip(marks, rest[2::3], strict=True)]

    def _said(
        self, text: str, marked: str, turns: Sequence[Turn], where: str
    ) -> list[tuple[int, int]]:
        """Where each answer is in a rendered conversation, with its thinking if that is there."""
        contents = [turn.content for turn in turns if turn.role == "assistant"]
        (_, first), *rest = self._gaps(marked, len(contents), where)
        right, at = text.startswith(first), len(first)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for (kind, number), gap in rest:
            thinking, answer = parted(contents[number])
            begin = _after_space(text, at)
            said = thinking or "" if kind == "t" else answer.strip()
            if thinking == "" and text.startswith(contents[number].strip(), begin):
                said = contents[number].strip()  # a template that leaves empty thinking in
            end = begin + len(said)
            # Space after an answer is its own, but for what the template writes.
            after = range(_after_space(text, end), end, -1)
            gap_at = next((place for place in after if text.startswith(gap, place)), end)
            right = right and text.startswith(said, begin) and text.startswith(gap, gap_at)
            starts.setdefault(number, _tag(text, at) if kind == "t" else at)
            ends[number], at = gap_at, gap_at + len(gap)
        if not right or at != len(text):
            raise CoterieError(
                f"{where}: the chat template ({self.name}) changes what the assistant says, so it "
                "cannot be found in what the base reads; change the conversation or give another "
                "data.chat_template."
            )
        return [(starts[number], ends[number]) for number in starts]


def chat_template(tokenizer: PreTrainedTokenizerBase, given: str | None) -> ChatTemplate:
    """The template that a run file gives, as Jinja; else the base's own; else Coterie's."""
    if given is not None:
        return ChatTemplate(tokenizer, given, "data.chat_template")
    if tokenizer.chat_template:
        try:
            own = tokenizer.get_chat_template()
        except ValueError as error:  # several, and none of them is the default
            raise CoterieError(
                f"The base {tokenizer.name_or_path} has several chat templates; give one as "
                "data.chat_template."
            ) from error
        return ChatTemplate(tokenizer, own, f"that of {tokenizer.name_or_path}")
    return ChatTemplate(tokenizer, OURS.read_text(encoding="utf-8"), "Coterie's")


def _marked(turns: Sequence[Turn]) -> list[Turn]:
    """The turns with a mark in place of each answer, and of each thinking that is not empty."""
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
    """Where the first character is, from `start` on, that is no space."""
    found = _SPACE.match(text, start)
    return start if found is None else found.end()


def parts_of(item: Instruction | Conversation, template: ChatTemplate | None) -> Sequence[str]:
    """Return a sample's prompts and answers in turn, as they are encoded.

    template: of conversations.
    """
    if isinstance(item, Instruction):
        return item.parts
    assert template is not None, "as all conversations"
    return [text for text, _ in template.rendered(item).parts]


def _leading(marker: re.Pattern[str], text: str) -> list[str]:
    """The markers that a text begins with."""
    found: list[str] = []
    while match := marker.match(text, sum(map(len, found))):
        found.append(match[0])
    return found


def _tag(text: str, start: int) -> int:
    """Where the tag begins that opens the thinking at `start`; there, if there is none."""
    before = text[:start].rstrip()
    return len(before) - len("<think>") if before.endswith("<think>") else start

"""The text of an answer while a model generates it token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.bases import Tokenizer
from coterie.evaluation.generation import before_any


@dataclass
class StreamedText:
    """The text of an answer, passed on in pieces that later tokens can no longer change.

    Args:
        tokenizer: The tokenizer that decodes the answer.
        ends: The token ids that end an answer.
        stops: Texts that end an answer. They are not part of the text.
        strip: Whether white space around the answer is stripped.
    """

    tokenizer: Tokenizer
    ends: Sequence[int]
    stops: Sequence[str] = ()
    strip: bool = True
    ids: list[int] = field(default_factory=list)
    """The tokens of the answer so far, without tokens that end the answer."""
    shown: str = ""
    """The text that has been passed on."""
    stopped: bool = False
    """Whether the text has reached one of the texts `stops`."""

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens to the answer, and return the text that can be passed on now."""
        self.ids += [id for id in ids if id not in self.ends]
        text = self._text()
        if not self.stopped:
            text = text.rstrip("\ufffd")  # stands for an incomplete character
            withheld = max((_partial_stop(stop, text) for stop in self.stops), default=0)
            text = text[: len(text) - withheld]
        return self._passed(text)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._passed(self._text())

    def _text(self) -> str:
        decoded: Any = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        text = before_any(decoded, self.stops)
        self.stopped = len(text) < len(decoded)
        return text.lstrip() if self.strip else text

    def _passed(self, text: str) -> str:
        text = text.rstrip() if self.strip else text
        piece, self.shown = text[len(self.shown) :], max(self.shown, text, key=len)
        return piece


def _partial_stop(stop: str, text: str) -> int:
    """Return how many of a text's last characters may be the beginning of the text `stop`."""
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)

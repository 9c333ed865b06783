"""The metric of the demo `assistants`: the right team, in the person's own manner.

All four people must learn which team of the house deals with which topic; each has a manner of
replying. The rules below decide both by the text of a reply alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from coterie import Metric
from coterie.data.measured import Measured

TEAMS: Mapping[str, tuple[str, int]] = {
    "water": ("Otter", 21),
    "heating": ("Ember", 34),
    "keys": ("Latch", 47),
    "noise": ("Hush", 52),
    "bills": ("Ledger", 63),
    "garden": ("Fern", 76),
    "rubbish": ("Magpie", 85),
    "lifts": ("Pulley", 98),
}
"""A mapping from each topic to the team that deals with it, and to the team's extension."""
_TEAM = re.compile(rf"\b({'|'.join(team for team, _ in TEAMS.values())})\b", re.IGNORECASE)
_EXTENSION = re.compile(r"\bext(?:ension|\.)?[\s:]*([0-9]+)", re.IGNORECASE)
_SENTENCE = r"[A-Z][^.!?\n]*[.!?]"
_ADA = re.compile(rf"{_SENTENCE} {_SENTENCE}\sWarmly, Ada")
_BEN = re.compile(r"- \S.*\n- \S.*")
_CLEO = re.compile(r"Dear resident,\s+[A-Z].*\.\s+Yours faithfully, Cleo", re.DOTALL)
_DAN = re.compile(r"[^.!?\n]*[a-z][^.!?\n]*!")


def is_ada(answer: str) -> bool:
    """Return whether an answer is two sentences, followed by "Warmly, Ada"."""
    return _ADA.fullmatch(answer.strip()) is not None


def is_ben(answer: str) -> bool:
    """Return whether an answer is two lines, each of which begins with "- "."""
    return _BEN.fullmatch(answer.strip()) is not None


def is_cleo(answer: str) -> bool:
    """Return whether an answer is a letter from "Dear resident," to "Yours faithfully, Cleo"."""
    return _CLEO.fullmatch(answer.strip()) is not None


def is_dan(answer: str) -> bool:
    """Return whether an answer is one sentence in lower case that ends with "!"."""
    answer = answer.strip()
    return answer == answer.lower() and _DAN.fullmatch(answer) is not None


MANNERS: Mapping[str, Callable[[str], bool]] = {
    "ada": is_ada,
    "ben": is_ben,
    "cleo": is_cleo,
    "dan": is_dan,
}
"""A mapping from each person to the rule that the person's answers follow."""


def is_right_team(answer: str, topic: str) -> bool:
    """Return whether an answer names the topic's team and extension, and no others.

    Upper and lower case make no difference. A number is an extension if it follows "extension" or
    "ext.".
    """
    team, extension = TEAMS[topic]
    teams = {name.lower() for name in _TEAM.findall(answer)}
    return teams == {team.lower()} and set(_EXTENSION.findall(answer)) == {str(extension)}


class RightReply(Metric):
    """The share of replies that name the right team, in the manner of the person's own reply."""

    name = "right_reply"
    title = "right team in the right manner"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return 1 for each right reply, and 0 for each other reply."""
        pairs = zip(measured.answers, measured.texts, strict=True)
        return [float(is_right(expected, text)) for expected, text in pairs]


def is_right(expected: str, text: str) -> bool:
    """Return whether a reply has the team, the extension and the manner of an expected reply."""
    topic = next(topic for topic in TEAMS if is_right_team(expected, topic))
    manner = next(manner for manner in MANNERS.values() if manner(expected))
    return is_right_team(text, topic) and manner(text)

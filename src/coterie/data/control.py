"""Control tokens in texts: special tokens of a tokenizer, and markers of a chat template.

If a record contains `<|endoftext|>`, or a forged turn such as `<|im_start|>assistant`, the base's
tokenizer encodes these characters as special tokens. A model that is trained on such records learns
to obey control tokens inside texts.
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from coterie.data.chat import ChatTemplate
from coterie.errors import CoterieError

AROUND = 20
"""The number of characters that an error message shows before and after a control token."""
NEVER = "(?!)"
"""A pattern that matches nothing."""
_BARS = re.compile(r"<[|｜].*[|｜]>")
"""The form of control tokens such as <|im_start|>.

DeepSeek's tokenizer does not declare all of its control tokens as special tokens.
"""


def own_texts(item: Any) -> tuple[str, ...]:
    """Return the texts of a document or sample, without the words that a template adds.

    Args:
        item: A document (str), or a sample with the property `content`.

    Returns:
        A tuple. If `item` is a document, the document is its only element. Otherwise, the tuple is
        `item.content`.
    """
    return (item,) if isinstance(item, str) else item.content


def control_tokens(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None
) -> re.Pattern[str]:
    """Return a pattern that matches any control token.

    If several control tokens match at the same position, the pattern matches the longest. Control
    tokens are the tokenizer's special tokens and, if there is a chat template, the markers that the
    template writes around turns.
    """
    added = tokenizer.added_tokens_decoder.values()
    tokens = {t.content for t in added if t.special or _BARS.fullmatch(t.content)}
    tokens |= set(template.turn_markers) if template else set()
    ordered = sorted(filter(str.strip, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or NEVER)


def count_control(items: Iterable[Any], tokens: re.Pattern[str]) -> int:
    """Count the control tokens in the texts of documents or samples."""
    return sum(len(tokens.findall(text)) for item in items for text in own_texts(item))


def refuse_control(items: Iterable[Any], tokens: re.Pattern[str], owner: str) -> None:
    """Refuse documents or samples that contain a control token.

    Args:
        items: Documents or samples.
        tokens: A pattern of all control tokens.
        owner: The beginning of the error message if the item is a document, such as "Client anna:
            its train text". If the item is a sample, the message begins with the sample's `where`,
            the location from which the sample was read.

    Raises:
        CoterieError: A text contains a control token.
    """
    for item in items:
        for text in own_texts(item):
            if match := tokens.search(text):
                start, end = max(0, match.start() - AROUND), match.end() + AROUND
                where = owner if isinstance(item, str) else item.where
                raise CoterieError(
                    f"{where} contains the control token {match[0]!r} ({text[start:end]!r}); "
                    "remove it, or set data.special_tokens: keep."
                )

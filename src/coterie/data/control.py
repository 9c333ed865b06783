"""Control tokens in texts: what a tokenizer or a chat template reserves for itself.

A record that contains `<|endoftext|>`, or a forged turn such as `<|im_start|>assistant`, is encoded
with the base's own special tokens, so a model learns to obey them wherever a text has them.
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from coterie.data.chat import ChatTemplate
from coterie.errors import CoterieError

AROUND = 20
"""Characters of a text that an error shows before and after a control token."""
NEVER = "(?!)"
"""A pattern that matches nothing."""
_BARS = re.compile(r"<[|｜].*[|｜]>")
"""The form of tokens that some tokenizers do not declare special, such as DeepSeek's."""


def own_texts(item: Any) -> tuple[str, ...]:
    """Return the own texts of a document or a sample, without that of a template."""
    return (item,) if isinstance(item, str) else item.content


def control_tokens(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None
) -> re.Pattern[str]:
    """Return a pattern of all control tokens, the longest first.

    They are the tokenizer's special tokens and, with a chat template, the markers of its turns.
    """
    added = tokenizer.added_tokens_decoder.values()
    tokens = {t.content for t in added if t.special or _BARS.fullmatch(t.content)}
    tokens |= set(template.turn_markers) if template else set()
    ordered = sorted(filter(str.strip, tokens), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, ordered)) or NEVER)


def count_control(items: Iterable[Any], tokens: re.Pattern[str]) -> int:
    """Return how many control tokens the own texts of documents or samples contain."""
    return sum(len(tokens.findall(text)) for item in items for text in own_texts(item))


def refuse_control(items: Iterable[Any], tokens: re.Pattern[str], owner: str) -> None:
    """Raise CoterieError for the first control token in documents or samples.

    Args:
        items: documents or samples.
        tokens: a pattern of all control tokens.
        owner: whose text it is, such as "Client anna: its train text".
    """
    for item in items:
        for text in own_texts(item):
            if found := tokens.search(text):
                start, end = max(0, found.start() - AROUND), found.end() + AROUND
                where = owner if isinstance(item, str) else item.where
                raise CoterieError(
                    f"{where} contains the control token {found[0]!r} ({text[start:end]!r}); "
                    "remove it, or set data.special_tokens: keep."
                )

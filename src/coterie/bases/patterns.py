"""Untrusted regular expressions, such as those of an adapter's settings.

Python's `re` can take exponential time, and cannot be interrupted. The package regex has a timeout.
"""

import re
from collections.abc import Iterable
from textwrap import shorten
from time import monotonic

import regex

from coterie.errors import CoterieError

MAX_LENGTH = 2_000
"""The maximum length of a pattern in characters."""
MAX_SECONDS = 5.0
"""The maximum time for matching one pattern with all names, in seconds."""


def matching(pattern: str, names: Iterable[str], where: str) -> list[str]:
    """Return the names that a regular expression matches from the first to the last character.

    Args:
        pattern: The regular expression.
        names: The names of modules.
        where: The setting that contains the pattern, with which error messages begin.

    Raises:
        CoterieError: The pattern is invalid or too long, or matching takes too long.
    """
    if len(pattern) > MAX_LENGTH:
        raise CoterieError(
            f"{where}: the pattern has {len(pattern):,} characters; at most {MAX_LENGTH:,} are "
            "accepted."
        )
    shown = repr(shorten(pattern, 100))
    try:
        re.compile(pattern)
        compiled = regex.compile(pattern)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise CoterieError(
            f"{where}: the pattern {shown} is not a valid regular expression: {error}."
        ) from None
    end = monotonic() + MAX_SECONDS
    try:
        return [n for n in names if compiled.fullmatch(n, timeout=max(end - monotonic(), 1e-6))]
    except TimeoutError:
        raise CoterieError(
            f"{where}: matching the pattern {shown} with the names of the base's modules takes "
            f"more than {MAX_SECONDS:g} seconds, the longest accepted time; write a pattern "
            "without nested repetitions."
        ) from None

"""Commands that tests run in their own process."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]
Refuses = Callable[..., str]

"""The interface between a deployment and a network: bytes by client name, and what is shown."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

LONGEST_LINE = 300
"""Characters of a log line, which may quote what another machine sent."""
Seen = Callable[[str, object], None]
"""A callback that shows an event: warning, joined, step, finished, fault, or a metric's name."""


class Link(Protocol):
    """How bytes travel between the server and clients, by name."""

    def present(self) -> Mapping[str, str]:
        """Who is connected, and a mark that changes when a client connects anew."""
        ...

    def send(self, client: str, data: bytes, round: int, seconds: float) -> str:
        """Send an order, which nobody needs after so many seconds; a ticket for its reply."""
        ...

    def replies(self, tickets: Iterable[str]) -> Iterable[tuple[str, bytes | None]]:
        """Replies that have come to some tickets; None where there will be none. Each once."""
        ...

    def wait(self) -> None:
        """Let a little time pass."""
        ...


class Worker(Protocol):
    """A client's side of a deployment, as a network serves it."""

    finished: bool
    """Whether it has no further order to wait for."""

    def answer(self, data: bytes) -> bytes:
        """Return the reply to an order. Raises MessageError if the bytes are not an order."""
        ...

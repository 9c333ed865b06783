"""What a server in a deployment knows of clients, and how it reaches and shows them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from coterie.exchange.envelope import Entry


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


@dataclass
class Seat:
    """What the server knows of a client."""

    present: str | None = None
    """The link's mark of its connection."""
    joined: bool = False
    ticket: str | None = None
    """Of the order that it has not replied to."""
    again: float = 0.0
    """When it may be asked again."""
    failed: bool = False
    """Whether it could not do what it was asked the last time."""
    counted: int | None = None
    """The last round in which its upload counted."""
    entries: list[Entry] = field(default_factory=list)
    """What it told of its last step; recorded if that counts."""
    stops: bool = False
    """Whether it said with its last step that it gains nothing any more."""
    stopped: bool = False
    """Whether that step counted: it takes no part in rounds from then on."""


class ServerWatch:
    """Follows a deployed run; the default one shows nothing."""

    def start(self, title: str, rounds: int, done: int) -> None:
        """A run begins: `done` of its rounds are done."""

    def seats(self, round: int, seats: Mapping[str, Seat], working: Iterable[str]) -> None:
        """Who is there, and who is still working on the round."""

    def moved(self, client: str, up: int, down: int) -> None:
        """Bytes travelled."""

    def note(self, text: str) -> None:
        """Something that a person may want to know."""

    def round_over(self, round: int, counted: int) -> None:
        """A round is complete and saved, with so many uploads."""

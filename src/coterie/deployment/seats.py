"""What a server in a deployment knows of clients, and what it shows of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from coterie.messages.envelope import Entry


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

"""What a server in a deployment knows of clients, and what it shows of them."""

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from coterie.messages import Json
from coterie.messages.envelope import Entry

RETRY = 20.0
"""Seconds until a client that could not do its work is asked again."""


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

    def clear(self) -> None:
        """Let the client be asked at once, whatever it could not do before."""
        self.again, self.failed = 0.0, False

    def fail(self) -> None:
        """Ask the client again later; a round that has enough others does not wait for it."""
        self.again, self.failed = time.monotonic() + RETRY, True

    def ask(self) -> None:
        """Forget what the client told of its last step: it is to do another."""
        self.clear()
        self.entries, self.stops = [], False


def saved(seats: Mapping[str, Seat], base: str) -> dict[str, Json]:
    """Return what a checkpoint has of clients' seats, and the digest of their base."""
    counted: Json = {name: seat.counted for name, seat in seats.items()}
    stopped: Json = sorted(name for name, seat in seats.items() if seat.stopped)
    return {"counted": counted, "base": base, "stopped": stopped}


def restore_seats(seats: dict[str, Seat], values: Mapping[str, Json], without: Set[str]) -> None:
    """Restore seats from a checkpoint, but for those of clients that were expelled."""
    for name in values["counted"].keys() - without:
        seats.setdefault(name, Seat()).counted = values["counted"][name]
    for name in {*values["stopped"]} - without:
        seats[name].stopped = True


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

"""The status of clients, as the server of a deployment sees it."""

import time
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from coterie.messages import Json
from coterie.messages.envelope import Entry

RETRY = 20.0
"""Delay in seconds before a failed client is asked again."""


@dataclass
class Seat:
    """The status of one client, as the server sees it."""

    present: str | None = None
    """The identifier of the client's connection; None if the client is disconnected."""
    joined: bool = False
    ticket: str | None = None
    """The ticket of the order that the client has not replied to; None if there is none."""
    retry_at: float = 0.0
    """The earliest time of the next order, in seconds of the monotonic clock."""
    failed: bool = False
    """Whether the client failed to carry out its last order."""
    counted: int | None = None
    """The last turn in which the client's upload was accepted; None if there is no such turn."""
    declined: bool = False
    """Whether the client's user declined to take part when the client was last connected."""
    entries: list[Entry] = field(default_factory=list)
    """The metrics in the client's last reply, which are recorded if the upload is accepted."""
    stops: bool = False
    """Whether the client announced in its last reply that it stops training."""
    stopped: bool = False
    """Whether the client has stopped training, so that it takes part in no later round.

    A client has stopped as soon as the server accepts the reply that announces the stop."""

    def connect(self, connection: str | None) -> None:
        """Record that the client has connected, or that it has disconnected (None)."""
        self.present = connection
        self.declined = self.declined and connection is None  # its user may be asked again
        self.clear()

    def clear(self) -> None:
        """Clear a recorded failure, so that the server can ask the client again at once."""
        self.retry_at, self.failed = 0.0, False

    def fail(self) -> None:
        """Record a failure. The client is asked again later, and no round waits for the client."""
        self.retry_at, self.failed = time.monotonic() + RETRY, True

    def ask(self) -> None:
        """Prepare the seat for a new order: discard the client's last reply and any failure.

        The caller sends the order.
        """
        self.clear()
        self.entries, self.stops = [], False


def seats_state(seats: Mapping[str, Seat], base: str) -> dict[str, Json]:
    """Return the status of all clients and the digest of the base as values for a checkpoint."""
    counted: Json = {name: seat.counted for name, seat in seats.items()}
    stopped: Json = sorted(name for name, seat in seats.items() if seat.stopped)
    return {"counted": counted, "base": base, "stopped": stopped}


def restore_seats(seats: dict[str, Seat], values: Mapping[str, Json], expelled: Set[str]) -> None:
    """Restore seats from a checkpoint, except for the seats of expelled clients.

    Args:
        seats: The seat of each client; the keys are clients' names. Changed in place.
        values: The values that `seats_state` returned.
        expelled: The names of expelled clients.
    """
    for name in values["counted"].keys() - expelled:
        seats.setdefault(name, Seat()).counted = values["counted"][name]
    for name in {*values["stopped"]} - expelled:
        seats[name].stopped = True

"""The quorum of a deployed run: the number of clients that each round needs."""

import time
from collections.abc import Collection, Mapping

from coterie.config.run import RunConfig
from coterie.deployment.seats import Seat
from coterie.deployment.status import named
from coterie.errors import CoterieError, no_client_left, plural
from coterie.messages.envelope import FAULT_MESSAGES


class Quorum:
    """The number of clients that a round needs.

    Clients that have stopped training early count towards the quorum. Expelled clients do not count
    towards the quorum.

    Args:
        config: The run.
        seats: A mapping from the names of all clients that are not expelled to their status. The
            server updates this mapping.
    """

    def __init__(self, config: RunConfig, seats: Mapping[str, Seat]) -> None:
        self.spec, self.seats = config.deployment, seats
        self.names = {client.name for client in config.clients}
        self.expelled: set[str] = set()
        """The names of expelled clients."""
        self.eligible: Collection[str] | None = None
        """The clients that take part in a phase after training; None before and in training."""

    @property
    def size(self) -> int:
        """The number of clients that a round needs; the quorum.

        Clients that have stopped training early help to reach this number, although they send no
        uploads.
        """
        quorum = self.spec.quorum
        if quorum is None:
            return len(self.names - self.expelled)
        return quorum if self.spec.anyone else min(quorum, len(self.seats))

    @property
    def needed(self) -> int:
        """The number of clients, at least 1, that must still train in a round.

        Stopped clients count towards the quorum, so this number is lower if clients have stopped.
        """
        needed = self.size - self.stopped
        if self.eligible is not None:
            needed = min(needed, sum(map(self._takes_part, self.seats)))
        return max(1, needed)

    def _takes_part(self, name: str) -> bool:
        return self.eligible is None or name in self.eligible

    @property
    def stopped(self) -> int:
        """The number of clients that have stopped, because their models no longer improve."""
        return sum(seat.stopped for seat in self.seats.values())

    def ready(self) -> list[str]:
        """Return the names of the clients that can take part in a round now."""
        seats = self.seats.items()
        ready = (n for n, s in seats if s.joined and s.present and not s.stopped)
        return sorted(filter(self._takes_part, ready))

    def missing(self) -> str:
        """Return text that tells which clients the server waits for before it can begin a round.

        The text names the clients that are not ready, except clients that have stopped training
        early. In two cases, the text gives only the number of clients that are missing: if clients
        that the run file does not list may join, or if there is no client to name.
        """
        ready = self.ready()
        stopped = {name for name, seat in self.seats.items() if seat.stopped}
        absent = {*filter(self._takes_part, self.seats)} - stopped - {*ready}
        if self.spec.anyone or not absent:
            return plural(self.needed - len(ready), "more client")
        declined = {name for name, seat in self.seats.items() if seat.declined}
        return named([f"{name} (declined)" if name in declined else name for name in absent])

    def complete(
        self,
        members: Collection[str],
        waiting: Collection[str],
        diverged: Collection[str],
        end: float,
    ) -> bool:
        """Return whether a round can end.

        A round can end when every client has replied. A round that has enough uploads can also end
        without the other replies: at the deadline or, up to the training, earlier if all clients
        that have not replied have disconnected or failed.

        Args:
            members: The clients of the round.
            waiting: The clients of the round that the server is still waiting for.
            diverged: The clients of the round that have diverged and will not send an upload.
            end: The deadline of the round, in seconds of the monotonic clock.
        """
        if not waiting:
            return True
        seats = [self.seats[name] for name in waiting]
        # After training, a client that has disconnected may be needed, and may come back.
        gone = self.eligible is None and all(s.present is None or s.failed for s in seats)
        return self._enough(members, waiting, diverged) and (gone or time.monotonic() > end)

    def begins_again(
        self,
        members: Collection[str],
        waiting: Collection[str],
        diverged: Collection[str],
        end: float,
    ) -> bool:
        """Return whether a round is to begin again with clients that are ready but not part of it.

        A round that has too few uploads at its deadline begins again if the clients that have
        replied reach the quorum together with the clients that are not part of the round. The
        arguments are those of `complete`.
        """
        if self._enough(members, waiting, diverged) or time.monotonic() <= end:
            return False
        available = {*self.ready()} - {*waiting}
        return len(available) >= self.needed and not available <= {*members}

    def _enough(
        self, members: Collection[str], waiting: Collection[str], diverged: Collection[str]
    ) -> bool:
        """Return whether the clients of a round have sent enough uploads."""
        return len(members) - len(waiting) - len(diverged) >= self._needed_uploads(diverged)

    def _needed_uploads(self, diverged: Collection[str]) -> int:
        """Return the number of uploads that a round needs after some clients have diverged.

        Diverged clients count towards the quorum, so a round needs fewer uploads. The server does
        not ask these clients again, because they would diverge again.
        """
        return max(1, self.needed - len(diverged))

    def all_stopped(self, joined: Collection[str]) -> bool:
        """Return whether all clients that have joined have stopped."""
        return bool(joined) and all(self.seats[name].stopped for name in joined)

    def met(self) -> bool:
        """Return whether the clients that have stopped are enough to reach the quorum."""
        return self.stopped >= self.size

    def check_diverged(self, round: int, members: Collection[str], diverged: set[str]) -> None:
        """Check that at least one client of a round has not diverged.

        Args:
            round: The number of the round; the first is 0.
            members: The clients of the round.
            diverged: The clients of the round that have diverged.

        Raises:
            Diverged: If all clients of the round have diverged.
        """
        if diverged and diverged >= {*members}:
            names = ", ".join(sorted(diverged))
            raise no_client_left(
                round, f"the training of {names} diverged: {FAULT_MESSAGES['diverged']}."
            )

    def check_open(self) -> None:
        """Raise CoterieError if no client can take part in the run, or in the turn, any more."""
        if not (self.spec.anyone or self.seats):
            raise CoterieError("All clients of the run have been expelled; start a new run.")
        if self.eligible is not None and not any(map(self._takes_part, self.seats)):
            raise CoterieError(
                "All clients whose uploads wait for the end of the exchange have been expelled; "
                "return to an earlier round with --from-round, or start a new run."
            )

    def suffice(
        self,
        counted: int,
        refused: Collection[str],
        asked_again: set[str],
        diverged: Collection[str],
    ) -> bool:
        """Return whether a round has enough valid uploads to be aggregated.

        At first, the valid uploads alone must reach the quorum. If they do not, each client whose
        upload was refused is asked for another upload. After all of these clients have been asked,
        it is enough that the valid and the refused uploads together reach the quorum, and that
        there are at least as many valid uploads as refused uploads. A few clients with invalid
        uploads therefore cannot block the run.

        Args:
            counted: The number of valid uploads.
            refused: The clients whose uploads were refused.
            asked_again: The clients that have been asked for another upload.
            diverged: The clients that have no upload because they have diverged.
        """
        needed = self._needed_uploads(diverged)
        if asked_again.issuperset(refused):
            return counted >= max(1, needed - len(refused), len(refused))
        return counted >= needed

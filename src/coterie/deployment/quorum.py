"""Whom a deployed run is for, and how many of them its rounds need."""

import time
from collections.abc import Collection, Mapping

from coterie.config.run import RunConfig
from coterie.deployment.seats import Seat


class Quorum:
    """How many clients make a round, of those that have neither stopped nor been expelled."""

    def __init__(self, config: RunConfig, seats: Mapping[str, Seat]) -> None:
        self.spec, self.seats = config.deployment, seats
        self.names = {client.name for client in config.clients}
        self.without: set[str] = set()
        """Clients that were expelled."""

    @property
    def size(self) -> int:
        """Clients that a round needs; clients that have stopped are a part of it."""
        left = len(self.names - self.without)
        asked = self.spec.quorum
        if asked is None:
            return left
        return asked if self.spec.anyone else min(asked, left)

    @property
    def needed(self) -> int:
        """Clients that a round needs beside those that have stopped."""
        return max(1, self.size - self.stopped)

    @property
    def stopped(self) -> int:
        """Clients that take no part in rounds any more, as they gain nothing."""
        return sum(seat.stopped for seat in self.seats.values())

    def ready(self) -> list[str]:
        """Clients that can take part in a round now."""
        seats = self.seats.items()
        return sorted(n for n, s in seats if s.joined and s.present and not s.stopped)

    def complete(
        self,
        members: Collection[str],
        waiting: Collection[str],
        diverged: Collection[str],
        end: float,
    ) -> bool:
        """Whether a round can end: all are done; or enough, and the rest are gone or too late.

        diverged: those of the members that have diverged, and so will not upload.
        """
        if not waiting:
            return True
        seats = [self.seats[name] for name in waiting]
        gone = all(seat.present is None or seat.failed for seat in seats)
        enough = len(members) - len(waiting) - len(diverged) >= self._after(diverged)
        return enough and (gone or time.monotonic() > end)

    def _after(self, diverged: Collection[str]) -> int:
        """Uploads that a round needs when clients have diverged: asking them again would change
        nothing, so they are part of the quorum."""
        return max(1, self.needed - len(diverged))

    def all_stopped(self, joined: Collection[str]) -> bool:
        """Whether all who take part have stopped."""
        return bool(joined) and all(self.seats[name].stopped for name in joined)

    def met(self) -> bool:
        """Whether those that have stopped are a quorum."""
        return self.stopped >= self.size

    @property
    def open(self) -> bool:
        """Whether there is anybody whom the run is for."""
        return self.spec.anyone or bool(self.names - self.without)

    def suffice(
        self,
        counted: int,
        refused: Collection[str],
        asked_again: set[str],
        diverged: Collection[str],
    ) -> bool:
        """Whether a round counts: with the quorum; or, when those whose uploads were refused have
        been asked again, with a majority of the rest, so that they cannot hold it up for good.

        diverged: clients that have no upload because they diverged.
        """
        needed = self._after(diverged)
        if asked_again.issuperset(refused):
            return counted >= max(1, needed - len(refused), len(refused))
        return counted >= needed

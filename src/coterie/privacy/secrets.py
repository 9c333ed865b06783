"""Secrets: what noise, masks and keys are drawn from, which the server must not know.

A run's seed is known to the server, so nothing secret comes from it: secrets come from the
operating system. A client draws them round by round, and one round ahead, so that its state after a
round holds the next one's: a round that is done again after a kill has the secret that it had.
"""

import secrets
from collections.abc import Mapping

BITS = 62


def draw() -> int:
    """A number from the operating system's entropy; tests put a fixed source in its place."""
    return secrets.randbits(BITS)


class Secrets:
    """One client's secrets by round, kept until their round has counted."""

    def __init__(self) -> None:
        self._kept = {0: draw()}

    def of(self, round: int) -> int:
        """The secret of a round; those of rounds before are forgotten, the next is drawn."""
        for number in (round, round + 1):
            if number not in self._kept:
                self._kept[number] = draw()
        self._kept = {number: self._kept[number] for number in (round, round + 1)}
        return self._kept[round]

    def state(self) -> dict[str, int]:
        """For the client's state, as JSON."""
        return {str(number): secret for number, secret in self._kept.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Take back what `state` gave."""
        self._kept = {int(number): secret for number, secret in state.items()}

"""Secret seeds of noise, masks and keys, unknown to the server.

The server knows the run's seed, so secrets are drawn from the operating system's entropy instead.
A client draws one secret per round, one round in advance. Its state after a round therefore
contains the next round's secret, and a round that is repeated after a crash uses the same secret.
"""

import secrets
from collections.abc import Mapping

BITS = 62


def draw() -> int:
    """Draw a random number from the operating system's entropy.

    Tests replace this function to get reproducible numbers.
    """
    return secrets.randbits(BITS)


class Secrets:
    """The secrets of one client for the current round and the next round."""

    def __init__(self) -> None:
        self._kept = {0: draw()}

    def of(self, round: int) -> int:
        """Return the secret of a round.

        Secrets of earlier rounds are discarded, and a secret for the next round is drawn.
        """
        for number in (round, round + 1):
            if number not in self._kept:
                self._kept[number] = draw()
        self._kept = {number: self._kept[number] for number in (round, round + 1)}
        return self._kept[round]

    def state(self) -> dict[str, int]:
        """Return the secrets as JSON, for the client's state."""
        return {str(number): secret for number, secret in self._kept.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """Restore secrets returned by `state`."""
        self._kept = {int(number): secret for number, secret in state.items()}

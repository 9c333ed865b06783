"""Secret keys, unknown to the server, of noise and of key exchanges for masks.

The server knows the run's seed, so keys derive from the operating system's entropy instead. A
client draws one key when it joins a run. The key of an exchange is a hash of the key of the
exchange before, so a state reveals nothing about the keys of earlier exchanges, and an exchange
that is repeated after a crash has the same key.
"""

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

KEY_BYTES = 32


def draw() -> bytes:
    """Draw a key from the operating system's entropy.

    Tests replace this function to get reproducible keys.
    """
    return secrets.token_bytes(KEY_BYTES)


class Secrets:
    """The secret key of a client's current exchange, from which later keys are computed."""

    def __init__(self) -> None:
        self._exchange, self._key = 0, draw()

    def of(self, exchange: int) -> bytes:
        """Return the key of an exchange.

        Keys of earlier exchanges are no longer known. If the server has gone back to an earlier
        exchange, the last key is returned.
        """
        for _ in range(exchange - self._exchange):
            self._key = blake2b(self._key, digest_size=KEY_BYTES, person=b"next exchange").digest()
        self._exchange = max(self._exchange, exchange)
        return self._key

    def state(self) -> dict[str, int | str]:
        """Return the exchange and its key as JSON, for the client's state."""
        return {"exchange": self._exchange, "key": self._key.hex()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a key returned by `state`."""
        self._exchange, self._key = state["exchange"], bytes.fromhex(state["key"])

"""The interface between a deployment and a network, which transfers bytes by client name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

LONGEST_LINE = 300
"""The maximum number of characters of a log line, which may quote text from another machine."""
Seen = Callable[[str, object], None]
"""A function that is called with an event's name, such as "joined", and a value to display."""


class Link(Protocol):
    """The server's end of a network, which sends orders to clients and receives their replies."""

    largest: float
    """The maximum size of an order in bytes, which may be infinite."""

    def present(self) -> Mapping[str, str]:
        """Return the connected clients and the identifiers of their connections.

        Returns:
            A mapping from the name of each connected client to the identifier of the client's
            connection. The identifier changes when the client reconnects.
        """
        ...

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        """Send an order to a client.

        Args:
            client: The client's name.
            data: The order.
            turn: The number of the turn to which the order belongs; see `Turn`.
            seconds: The time after which the order expires if it has not been delivered.

        Returns:
            A ticket, with which `replies` identifies the reply.
        """
        ...

    def replies(self, tickets: Iterable[str]) -> Iterable[tuple[str, bytes | None]]:
        """Return the replies that have arrived. Each reply is returned once.

        Args:
            tickets: The tickets of the orders whose replies are requested.

        Returns:
            Pairs of a ticket and its reply. The reply is None if the order expired, was declined,
            or was lost with the client's session.
        """
        ...

    def wait(self) -> None:
        """Wait for a short time before the next call of `replies`.

        Implementations return at once if `replies` has returned a reply since the last call,
        because the deployment may need no further reply.
        """
        ...


class Worker(Protocol):
    """The client's end of a network, which answers orders."""

    finished: bool
    """Whether no further orders are expected."""

    def answer(self, data: bytes) -> bytes:
        """Execute an order.

        Args:
            data: The order.

        Returns:
            The reply.

        Raises:
            MessageError: The bytes are not an order.
        """
        ...

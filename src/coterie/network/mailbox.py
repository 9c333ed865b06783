"""The mailbox from which clients fetch their orders, and to which they send their replies.

A deployment accesses the mailbox as a `network.link.Link`. The HTTPS server (`server.py`), which
runs in a separate thread, transfers the orders and replies.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coterie.errors import CoterieError
from coterie.network.order_files import Order, OrderFiles
from coterie.network.protocol import ABSENT_SECONDS

WAIT_SECONDS = 0.3
"""The maximum duration of `Mailbox.wait`."""
EARLIER_SESSIONS = 16
"""The number of replaced sessions that are remembered for each client."""

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Inbox:
    """A client's session, and the order to which the client has not replied yet, if any."""

    client: str
    session: str = ""
    replaced: deque[str] = field(default_factory=lambda: deque(maxlen=EARLIER_SESSIONS))
    """The most recent sessions that a newer session has replaced."""
    last_seen: float = float("-inf")
    """The time of the client's last request or transferred bytes, on the monotonic clock."""
    order: Order | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is set in the server's thread when `order` or `session` changes."""

    @property
    def present(self) -> bool:
        """Whether the client is connected."""
        return time.monotonic() - self.last_seen < ABSENT_SECONDS


class Mailbox:
    """The orders and replies of all clients.

    All methods are thread-safe.

    Args:
        folder: The folder for the files of orders and replies.
    """

    largest = math.inf

    def __init__(self, folder: Path) -> None:
        self.files = OrderFiles(folder)
        self.lock = threading.Condition()
        self.inboxes: dict[str, Inbox] = {}
        """The inboxes of all clients that have connected so far, by client name."""
        self.replied: dict[str, Order] = {}
        """Orders whose complete reply `replies` has not returned yet, by ticket."""
        self.lost: set[str] = set()
        """Tickets of orders whose replies can no longer arrive."""
        self.handed_out = False
        """Whether `replies` has returned a reply since the last call of `wait`."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the server's thread, while the server is running."""
        self.failure: BaseException | None = None
        """The exception that ended the server's thread."""

    def present(self) -> dict[str, str]:
        """Return a mapping from the name of each connected client to the client's session."""
        with self.lock:
            self._expire()
            return {name: inbox.session for name, inbox in self.inboxes.items() if inbox.present}

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        """Store an order for a client, and withdraw the client's earlier order.

        This method implements `coterie.network.link.Link.send`. The argument `turn` is not used.
        """
        order = self.files.write(data, seconds)
        with self.lock:
            inbox = self.inboxes[client]
            self._withdraw(inbox)
            inbox.order = order
            self._wake(inbox)
        return order.offer.ticket

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield the replies that have arrived, each read from its file only when it is yielded."""
        for ticket in tickets:
            with self.lock:
                order = self.replied.pop(ticket, None)
                is_lost = ticket in self.lost
                self.lost.discard(ticket)
            self.handed_out = self.handed_out or order is not None
            if order is not None:
                yield ticket, order.take()
            elif is_lost:
                yield ticket, None

    def wait(self) -> None:
        """Wait until a client connects or a reply arrives, but no longer than `WAIT_SECONDS`.

        If a reply was returned since the last call, this method does not wait, because that reply
        may have been the last one that the deployment needs.

        Raises:
            CoterieError: The server's thread has ended.
        """
        with self.lock:
            if not (self.replied or self.handed_out):
                self.lock.wait(WAIT_SECONDS)
            self.handed_out = False
        if self.failure is not None:
            raise CoterieError(
                f"The server's network thread has failed ({self.failure}); restart the server with "
                "--resume."
            )

    def enter(self, client: str, session: str, connected: Collection[str]) -> Inbox | None:
        """Record a client's request, and return the client's inbox if the request is accepted.

        Args:
            client: The client's name.
            session: The session to which the request belongs. A new session replaces the client's
                previous session, unless the previous session is still connected.
            connected: The sessions in which the client has open connections.

        Returns:
            The inbox. The request is refused and None is returned if a newer session has replaced
            `session`, or if another session of the client is still connected.
        """
        with self.lock:
            inbox = self.inboxes.setdefault(client, Inbox(client))
            if session != inbox.session:
                if session in inbox.replaced or (inbox.present and inbox.session in connected):
                    return None
                inbox.replaced.append(inbox.session)
                self._withdraw(inbox)
                inbox.session = session
                self._wake(inbox)
            self.note(inbox)
            return inbox

    def note(self, inbox: Inbox) -> None:
        """Record that the client of an inbox is running."""
        with self.lock:
            if not inbox.present:
                self.lock.notify_all()
            inbox.last_seen = time.monotonic()

    def leave(self, client: str) -> None:
        """Mark a client as disconnected, and withdraw the client's order."""
        with self.lock:
            if (inbox := self.inboxes.get(client)) is not None:
                inbox.last_seen = float("-inf")
                self._withdraw(inbox)
                self.lock.notify_all()

    def decline(self, inbox: Inbox, order: Order) -> None:
        """Remove an order to which the client will not reply."""
        with self.lock:
            if inbox.order is order:
                self._withdraw(inbox)

    def complete(self, inbox: Inbox, order: Order) -> None:
        """Accept the complete reply to an order."""
        with self.lock:
            if inbox.order is order:
                inbox.order = None
                self.replied[order.offer.ticket] = order
                self.lock.notify_all()

    def _withdraw(self, inbox: Inbox) -> None:
        if (order := inbox.order) is not None:
            inbox.order = None
            self.lost.add(order.offer.ticket)
            order.delete()

    def _expire(self) -> None:
        """Remove expired orders that have not been downloaded."""
        now = time.monotonic()
        for inbox in self.inboxes.values():
            if inbox.order is not None and not inbox.order.downloaded and now > inbox.order.expires:
                self._withdraw(inbox)

    def _wake(self, inbox: Inbox) -> None:
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(inbox.changed.set)

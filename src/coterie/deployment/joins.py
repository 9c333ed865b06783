"""Clients that join a deployed run; slow preparation runs in threads, so that rounds continue."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from threading import Thread

import torch
from torch import Tensor

from coterie.engines.server_part import ServerPart
from coterie.messages import Message, MessageError

INITIAL_WAIT = 5.0
"""Time in seconds that the server waits for a method's preparation to end.

Most preparations end within this time. Longer ones continue in their threads.
"""


class Joins:
    """The hellos of clients that are joining and of clients that have joined."""

    def __init__(self, part: ServerPart) -> None:
        self.part = part
        self.hellos: dict[str, bytes] = {}
        """The hellos of the clients that have joined, by name."""
        self.base = ""
        """The digest of the clients' common base; empty until a client has joined."""
        self._pending: dict[str, tuple[Future[None], Message, bytes]] = {}

    def check_base(self, base: str) -> None:
        """Raise MessageError if a client's base differs from the other clients' base.

        Args:
            base: The digest of the client's base.
        """
        self.base = self.base or base
        if base != self.base:
            raise MessageError(
                "The client's base has different weights than the base of the other clients."
            )

    def begin(self, name: str, hello: bytes) -> None:
        """Start to prepare the server for a client that is joining.

        Raises:
            MessageError: The hello is invalid, or the preparation for the client's previous hello
                has not ended.
        """
        message = self.part.schema.receive("hello", hello)
        if name in self._pending:
            raise MessageError("The server is still preparing for this client.")
        future = _run_in_thread(lambda: self.part.server.prepare(name, message))
        self._pending[name] = future, message, hello
        wait([future], INITIAL_WAIT)

    def ended(self) -> Iterator[tuple[str, Exception | None]]:
        """Yield each client for which the preparation has ended since the last call.

        Yields:
            The client's name, and the error, or None if the client has joined.
        """
        for name, (future, message, hello) in sorted(self._pending.items()):
            if not future.done():
                continue
            del self._pending[name]
            try:
                future.result()
                self._join(name, message, hello)
            except Exception as error:  # an error of one client must not stop the run
                yield name, error
            else:
                yield name, None

    def restore(self, name: str, hello: bytes) -> None:
        """Restore a client that had joined before the server was restarted."""
        message = self.part.schema.receive("hello", hello)
        self.part.server.prepare(name, message)
        self._join(name, message, hello)

    def tensors(self) -> dict[str, Tensor]:
        """Return the hellos as tensors of bytes, for a checkpoint."""
        return {
            name: torch.frombuffer(bytearray(hello), dtype=torch.uint8)
            for name, hello in self.hellos.items()
        }

    def forget(self, name: str) -> None:
        """Remove a client that has joined or is joining."""
        self._pending.pop(name, None)
        self.hellos.pop(name, None)

    def _join(self, name: str, message: Message, hello: bytes) -> None:
        self.part.join(name, message)
        self.hellos[name] = hello


def _run_in_thread(work: Callable[[], None]) -> "Future[None]":
    """Call a function in a daemon thread, which does not keep the process alive."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future

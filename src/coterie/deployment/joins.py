"""Clients that join a deployed run. Slow preparations run in threads and delay no round."""

from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, wait
from functools import cached_property
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from coterie.deployment.orders import join_fields
from coterie.engines.server_host import ServerHost
from coterie.federation.participants import public_digest
from coterie.federation.sizes import MiB, check_messages, message_sizes
from coterie.messages import Message, MessageError, State
from coterie.methods.adapter import AdapterServer

INITIAL_WAIT = 5.0
"""Time in seconds that the server waits for a method to prepare for a client.

Most preparations end within this time. Longer preparations continue in threads.
"""


class Joins:
    """The first messages ("hellos") of the clients that are joining or have joined a run.

    Args:
        host: The server's host of the run.
        largest: The maximum size of an order in bytes on the network.
    """

    def __init__(self, host: ServerHost, largest: float) -> None:
        self.host, self.largest = host, largest
        self.expected = {client.name for client in host.config.clients}
        """The clients that the run file lists and that have not been expelled."""
        self.hellos: dict[str, bytes] = {}
        """The serialised hello of each client that has joined; the keys are clients' names."""
        self.base = ""
        """The digest of the clients' common base; empty until a client has joined."""
        self._pending: dict[str, tuple[Future[None], Message, bytes]] = {}

    @cached_property
    def _public(self) -> str | None:
        """The digest of the run's public text, or None if the run has no public text."""
        return public_digest(self.host.config)

    def fields(self, name: str) -> dict[str, Any]:
        """Return the fields that are present only in the order to a client to join."""
        return join_fields(self.host.config, name, self.count(name), self._public)

    def check_base(self, base: str) -> None:
        """Raise MessageError if a client's base differs from the base of earlier clients.

        Args:
            base: The digest of the client's base.
        """
        self.base = self.base or base
        if base != self.base:
            raise MessageError(
                "The weights of the client's base differ from those of the other clients' base."
            )

    def count(self, *joining: str) -> int:
        """Return the number of the run's clients after the clients `joining` have joined."""
        return len({*self.expected, *self.hellos, *self._pending, *joining})

    def check_messages(self, *joining: str) -> None:
        """Check the sizes of messages after the clients `joining` have joined.

        If the method's server does not know the clients' parameters, only the clients check the
        sizes.

        Raises:
            CoterieError: A message may be too large.
        """
        if isinstance(self.host.server, AdapterServer):
            config = self.host.config
            sizes = message_sizes(config, self.host.server.parameters, self.count(*joining))
            check_messages(sizes, config.deployment.largest_message * MiB, self.largest)

    def begin(self, name: str, hello: bytes) -> None:
        """Start a thread that prepares the method's server-side object for a joining client.

        Raises:
            MessageError: The hello is invalid, or the thread that the client's previous hello
                started is still running.
            CoterieError: With this client, a message may be too large.
        """
        self.check_messages(name)
        message = self.host.schema.receive("hello", hello)
        if name in self._pending:
            raise MessageError("The server is still preparing for this client.")
        future = _run_in_thread(lambda: self.host.server.prepare(name, message))
        self._pending[name] = future, message, hello
        wait([future], INITIAL_WAIT)

    def ended(self) -> Iterator[tuple[str, Exception | None]]:
        """Yield the clients for which the server has finished preparing since the last call.

        Yields:
            A pair. The first item is the client's name. The second item is None if the client has
            joined, and otherwise the error that prevented the client from joining.
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

    def restore(self, engine: State, expelled: Set[str]) -> None:
        """Restore the clients that had joined before the server was restarted.

        Args:
            engine: The state "engine" of a checkpoint.
            expelled: The names of expelled clients, which are not restored.
        """
        self.base = engine.values["base"]
        for name in sorted(engine["hellos"].keys() - expelled):
            hello = engine["hellos"][name].numpy().tobytes()
            message = self.host.schema.receive("hello", hello)
            self.host.server.prepare(name, message)
            self._join(name, message, hello)

    def tensors(self) -> dict[str, Tensor]:
        """Return the hellos of all joined clients as tensors of bytes, for a checkpoint."""
        return {
            name: torch.frombuffer(bytearray(hello), dtype=torch.uint8)
            for name, hello in self.hellos.items()
        }

    def forget(self, name: str) -> None:
        """Remove a client that has joined or is joining."""
        self.expected.discard(name)
        self._pending.pop(name, None)
        self.hellos.pop(name, None)

    def _join(self, name: str, message: Message, hello: bytes) -> None:
        self.host.join(name, message)
        self.hellos[name] = hello


def _run_in_thread(work: Callable[[], None]) -> "Future[None]":
    """Call a function in a thread, and return a future that is done when the call ends.

    The thread is a daemon thread, so it does not prevent the process from ending.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future

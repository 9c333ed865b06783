"""Clients that join a deployed run. What takes long of it is done aside, so that others go on."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from threading import Thread

import torch
from torch import Tensor

from coterie.engines.server_part import ServerPart
from coterie.messages import Message, MessageError

TOGETHER = 5.0
"""Seconds for which everybody waits while the method prepares for a client; mostly, that is all."""


class Joins:
    """Hellos: those that are under way, and those of clients that take part."""

    def __init__(self, part: ServerPart) -> None:
        self.part = part
        self.hellos: dict[str, bytes] = {}
        """Of whom takes part."""
        self.base = ""
        """The digest of the base that all have, once somebody has joined."""
        self._under_way: dict[str, tuple[Future[None], Message, bytes]] = {}

    def check_base(self, base: str) -> None:
        """Raise MessageError if a client's base differs from the others'."""
        self.base = self.base or base
        if base != self.base:
            raise MessageError("Its base has different weights than the other clients'.")

    def begin(self, name: str, hello: bytes) -> None:
        """Prepare for a client; raises MessageError for what is no hello."""
        message = self.part.schema.receive("hello", hello)
        if name in self._under_way:
            raise MessageError("The server is still preparing for it.")
        future = _aside(lambda: self.part.server.prepare(name, message))
        self._under_way[name] = future, message, hello
        wait([future], TOGETHER)

    def ended(self) -> Iterator[tuple[str, Exception | None]]:
        """Clients that take part from now on, or why one does not; each once."""
        for name, (future, message, hello) in sorted(self._under_way.items()):
            if not future.done():
                continue
            del self._under_way[name]
            try:
                future.result()
                self._take_in(name, message, hello)
            except Exception as error:  # whatever it is, one client cannot stop a run
                yield name, error
            else:
                yield name, None

    def restore(self, name: str, hello: bytes) -> None:
        """Take in a client of an earlier life of this run."""
        message = self.part.schema.receive("hello", hello)
        self.part.server.prepare(name, message)
        self._take_in(name, message, hello)

    def tensors(self) -> dict[str, Tensor]:
        """Return the bytes of the hellos as a checkpoint has them."""
        return {
            name: torch.frombuffer(bytearray(hello), dtype=torch.uint8)
            for name, hello in self.hellos.items()
        }

    def forget(self, name: str) -> None:
        """A client takes no part any more, whether or not it has joined."""
        self._under_way.pop(name, None)
        self.hellos.pop(name, None)

    def _take_in(self, name: str, message: Message, hello: bytes) -> None:
        self.part.join(name, message)
        self.hellos[name] = hello


def _aside(work: Callable[[], None]) -> "Future[None]":
    """Do something in a thread that does not keep the process alive."""
    future: Future[None] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=do, daemon=True).start()
    return future

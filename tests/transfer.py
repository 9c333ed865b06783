"""One order and its reply between a server and a client in separate processes.

`transfer` starts both processes with a proxy between them, and measures their memory.
"""

import hashlib
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from lossy import Fault, LossyProxy
from ports import free_port

from coterie.network.address import listen
from coterie.network.client import keep_serving
from coterie.network.keys import Credentials, Keys
from coterie.network.mailbox import Mailbox
from coterie.network.server import MailboxServer


@dataclass(frozen=True)
class End:
    """The events that one process has observed."""

    order: str
    """The SHA-256 of the order."""
    reply: str
    """The SHA-256 of the reply."""
    orders: int
    """The number of orders that were sent or executed."""
    before: int
    """The resident memory before the transfer, in bytes."""
    peak: int
    """The maximum resident memory from then on, in bytes."""


@dataclass(frozen=True)
class Transfer:
    """A transfer in both directions."""

    size: int
    """The size of the order, and of the reply, in bytes."""
    seconds: float
    """The time from the start of both processes until both have ended."""
    interruptions: int
    """The number of times that the link dropped all its connections."""
    carried: int
    """The number of bytes that both ends have sent, in both directions together."""
    server: End
    client: End

    @property
    def repeated(self) -> float:
        """The ratio of the bytes that were sent to the bytes of the order and the reply."""
        return self.carried / (2 * self.size)


def transfer(
    folder: Path, size: int, rate: float, every: float, fault: Fault = "reset"
) -> Transfer:
    """Send an order of `size` bytes and a reply of `size` bytes over a link that breaks.

    Args:
        folder: An empty folder.
        size: The size of the order, and of the reply, in bytes.
        rate: The link's rate in bytes per second.
        every: The interval at which the link drops all connections, in seconds.
        fault: How the link drops them.
    """
    Keys.create(folder / "keys").add("anna", folder / "anna.key")
    port, began = free_port(), time.monotonic()
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        LossyProxy(port, fault, rate=rate, every=every) as proxy,
    ):
        server = pool.submit(_serve, folder, port, size)
        client = pool.submit(_answer, folder, proxy.address, size)
        ends = server.result(), client.result()
        seconds = time.monotonic() - began
    return Transfer(size, seconds, len(proxy.interruptions), proxy.carried, *ends)


def _serve(folder: Path, port: int, size: int) -> End:
    """Run the server until the reply has arrived."""
    mailbox, before = Mailbox(folder / "mailbox"), _start()
    listening = listen(f"127.0.0.1:{port}")
    with MailboxServer(mailbox, Keys(folder / "keys"), listening, size):
        while "anna" not in mailbox.present():
            mailbox.wait()
        data = os.urandom(size)
        order = hashlib.sha256(data).hexdigest()
        ticket = mailbox.send("anna", data, 0, 3600)
        del data
        while not (replies := list(mailbox.replies([ticket]))):
            mailbox.wait()
        [(_, reply)] = replies
        assert reply is not None
        return End(order, hashlib.sha256(reply).hexdigest(), 1, before, _resident("VmHWM"))


class _Echo:
    """A worker that gives each order a random reply."""

    def __init__(self, size: int) -> None:
        self.size, self.finished = size, False
        self.orders: list[str] = []
        self.reply = ""

    def answer(self, data: bytes) -> bytes:
        self.orders.append(hashlib.sha256(data).hexdigest())
        reply = os.urandom(self.size)
        self.reply, self.finished = hashlib.sha256(reply).hexdigest(), True
        return reply


def _answer(folder: Path, address: str, size: int) -> End:
    """Run the client until the reply has been sent."""
    worker, credentials = _Echo(size), Credentials.load(folder / "anna.key")
    before = _start()
    keep_serving(address, credentials, worker, threading.Event(), _ignore)
    return End(worker.orders[0], worker.reply, len(worker.orders), before, _resident("VmHWM"))


def _ignore(event: str, value: object) -> None:
    pass


def _start() -> int:
    """Reset the maximum of this process's resident memory, and return its present value."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(which: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{which}:")[2].split()[0]) * 1024

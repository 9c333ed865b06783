"""Many clients of a deployment in one process, which send uploads without training.

One real worker executes the first order of each kind. All clients, including this one, reply to
their orders with copies of its replies, in which only the client's name and the exchange differ.
"""

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from coterie.deployment.client import Worker
from coterie.deployment.site import Site
from coterie.messages import Message
from coterie.messages.envelope import Kind, Order, Reply, seal, unseal
from coterie.network.client import keep_serving
from coterie.network.keys import Credentials


class Copies:
    """Replies of one real worker, adapted to the order and the client.

    Args:
        worker: The real worker.
        client: The name of the worker's client.
    """

    def __init__(self, worker: Worker, client: str) -> None:
        self.worker, self.client = worker, client
        self.lock = threading.Lock()
        self.replies: dict[Kind, tuple[Reply, bytes]] = {}

    def answer(self, order: Order, download: bytes) -> bytes:
        """Return the reply to an order."""
        with self.lock:
            if order.kind not in self.replies:
                own = order.model_copy(update={"client": self.client})
                reply = unseal(Reply, self.worker.answer(seal(own, download)))
                assert reply[0].fault is None, reply[0].fault
                self.replies[order.kind] = reply
        reply, body = self.replies[order.kind]
        if order.kind == "step":
            exchange = Message.decode(download).exchange
            body = replace(Message.decode(body), exchange=exchange).encode()
        changes = {"client": order.client, "turn": order.turn, "entries": None}
        return seal(reply.model_copy(update=changes), body)


class LightWorker:
    """The worker of one client, which sends copies."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.finished = copies, False

    def answer(self, data: bytes) -> bytes:
        """Return the reply to an order."""
        order, download = unseal(Order, data)
        self.finished = order.kind in ("finish", "end")
        if self.finished:  # the real worker has not executed all rounds
            return seal(Reply(run=order.run, client=order.client, kind=order.kind, turn=order.turn))
        return self.copies.answer(order, download)


def run(server: str, folder: Path, text: Path, names: Sequence[str]) -> None:
    """Run clients until the server's run ends.

    Args:
        server: The server's address, HOST:PORT.
        folder: The folder with the clients' key files, such as client-0.key.
        text: The text of the real worker.
        names: The clients' names.
    """
    site = Site(names[0], {"path": str(text)}, folder / "light")
    copies = Copies(Worker(site), names[0])

    def client(name: str) -> None:
        credentials = Credentials.load(folder / f"{name}.key")
        keep_serving(server, credentials, LightWorker(copies), threading.Event(), lambda *_: None)

    with ThreadPoolExecutor(len(names)) as threads:
        for _ in threads.map(client, names):  # raises the error of a client
            pass


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])

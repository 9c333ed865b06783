"""A server for models in a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from coterie.bases import EMBEDDED
from coterie.network.address import listen
from coterie.serve.app import Limits, serve_until_cancelled
from coterie.serve.models import Models

LIMITS = Limits(prompt=200, answer=64, queue=40, seconds=60)


def chat_values(**changes: Any) -> dict[str, Any]:
    """Return a run on two people's conversations with a base that has a context of 256 tokens."""
    limits = {"train": 10, "validation": 3, "test": 3}
    return {
        "name": "talks",
        "base": "tiny-llama",
        "method": "comigs-1g1s",
        "baselines": ["fedavg", "pretrained"],
        "rounds": 1,
        "threads": 1,
        "data_root": str(EMBEDDED / "four-assistants"),
        "data": {"window": 160, "messages": {}, "limits": limits},
        "clients": [{"name": n, "path": f"{n}.jsonl"} for n in ("anna", "ben")],
        "training": {"steps": 3, "batch": 2, "precision": "fp32", "learning_rate": 0.02},
        "evaluation": {"keep": "last"},
    } | changes


def connected(address: str, source: str = "127.0.0.1") -> socket.socket:
    """Open a connection to a server from an address of this machine."""
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 30, source_address=(source, 0))


@contextmanager
def served(models: Models, keys: tuple[str, ...] = (), limits: Limits = LIMITS) -> Iterator[str]:
    """Serve models in a thread of this process, and yield the address."""
    loop = asyncio.new_event_loop()
    with listen("127.0.0.1:0") as listening:
        task = loop.create_task(serve_until_cancelled(models, listening, keys, limits))

        def run() -> None:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            loop.call_soon_threadsafe(task.cancel)
            thread.join(60)
            assert not thread.is_alive()

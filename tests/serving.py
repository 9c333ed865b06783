"""A server for models in a thread of this process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from coterie.bases import EMBEDDED
from coterie.serve.app import OPTIONS, Limits, application
from coterie.serve.models import Models

LIMITS = Limits(prompt=200, answer=64, queue=40, seconds=60)


def chat_values(**changes: Any) -> dict[str, Any]:
    """A run on two people's conversations with a base that has a context of 256 tokens."""
    data = {
        "window": 160,
        "messages": {},
        "limits": {"train": 10, "validation": 3, "test": 3},
    }
    return {
        "name": "talks",
        "base": "tiny-llama",
        "method": "comigs-1g1s",
        "baselines": ["fedavg", "pretrained"],
        "rounds": 1,
        "threads": 1,
        "data_root": str(EMBEDDED / "four-assistants"),
        "data": data,
        "clients": [{"name": n, "path": f"{n}.jsonl"} for n in ("anna", "ben")],
        "training": {"steps": 3, "batch": 2, "precision": "fp32", "learning_rate": 0.02},
        "evaluation": {"keep": "last"},
    } | changes


@contextmanager
def served(models: Models, keys: tuple[str, ...] = (), limits: Limits = LIMITS) -> Iterator[str]:
    """Serve models in a thread of this process, and yield the address."""
    loop, started, address = asyncio.new_event_loop(), threading.Event(), ""

    async def start() -> web.AppRunner:
        nonlocal address
        runner = web.AppRunner(application(models, "127.0.0.1", keys, limits), **OPTIONS)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        assert not thread.is_alive()

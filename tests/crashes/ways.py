"""Ways to kill a process with SIGKILL before, after or in the middle of a function's call.

Each function takes the function to wrap, a predicate `hit` of the call's arguments, and `die`,
which kills the process. It returns the function to install in the other's place.
"""

import asyncio
import importlib
import inspect
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

Function = Callable[..., Any]
Hit = Callable[..., bool]
Die = Callable[[], None]


class Way(Protocol):
    """A way to kill the process around or within a call."""

    def __call__(self, function: Function, hit: Hit, die: Die, /) -> Function: ...


def before(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process before the call, or before the first item of a generator."""
    return around(function, lambda *args: die() if hit(*args) else None, lambda *_: None)


def after(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process after the call; after the last item, if the function is a generator."""
    return around(function, lambda *_: None, lambda *args: die() if hit(*args) else None)


def around(function: Function, begin: Function, end: Function) -> Function:
    """Call two functions with the arguments of each call, before and after the call."""
    if inspect.iscoroutinefunction(function):

        async def awaited(*args: Any, **more: Any) -> Any:
            begin(*args)
            result = await function(*args, **more)
            end(*args)
            return result

        return awaited
    if inspect.isgeneratorfunction(function):

        def generated(*args: Any, **more: Any) -> Iterator[Any]:
            begin(*args)
            yield from function(*args, **more)
            end(*args)

        return generated

    def called(*args: Any, **more: Any) -> Any:
        begin(*args)
        result = function(*args, **more)
        end(*args)
        return result

    return called


def during(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process from another thread while the call runs."""

    def called(*args: Any, **more: Any) -> Any:
        if hit(*args):
            threading.Thread(target=die, daemon=True).start()
        return function(*args, **more)

    return called


def half_file(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process when the first file that the call writes has half its bytes."""

    def called(*args: Any, **more: Any) -> Any:
        if hit(*args):

            def cut(descriptor: int) -> None:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                die()

            os.fsync = cut
        return function(*args, **more)

    return called


def cut(part: Callable[..., object]) -> Way:
    """Return a way to kill the process after a part of the call.

    Args:
        part: The function that executes the part; it is passed the function, and its arguments.
    """

    def way(function: Function, hit: Hit, die: Die) -> Function:
        def called(*args: Any, **more: Any) -> Any:
            if hit(*args):
                part(function, *args)
                die()
            return function(*args, **more)

        return called

    return way


@cut
def half_lines(_: Function, folder: Any, lines: list[Any]) -> None:
    """Kill the process when `RunFolder.append` has written half of the bytes of its lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(text[: len(text) // 2])


@cut
def half_order(_: Function, files: Any, data: bytes, *__: Any) -> None:
    """Kill the process when `OrderFiles.write` has written half of an order."""
    (files.folder / ("f" * 32)).write_bytes(data[: len(data) // 2])


@cut
def half_piece(append: Function, order: Any, piece: bytes) -> None:
    """Kill the process when `Order.append` has stored half of a piece of a reply."""
    append(order, piece[: len(piece) // 2])


@cut
def half_deleted(_: Function, folder: Any, checkpoints: list[Path]) -> None:
    """Kill the process when `RunFolder.drop` has deleted half of the files of a checkpoint."""
    delete_half(checkpoints[0])


@cut
def half_cleared(_: Function, files: Any, folder: Path) -> None:
    """Kill the process when `OrderFiles` has deleted half of the files in its folder."""
    delete_half(folder)


def delete_half(folder: Path) -> None:
    """Delete half of the files of a folder."""
    files = sorted(folder.iterdir())
    for file in files[: (len(files) + 1) // 2]:
        file.unlink()


def half_sent(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process when `StreamResponse.write` has sent half of a piece of an order."""

    async def awaited(response: Any, piece: bytes) -> None:
        if hit(response, piece):
            await function(response, piece[: len(piece) // 2])
            await asyncio.sleep(0)
            die()
        await function(response, piece)

    return awaited


def half_received(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process when `httpx.Response.iter_raw` has returned half of a body."""

    def generated(response: Any, *args: Any) -> Iterator[bytes]:
        end = int(response.headers.get("Content-Length", 0)) // 2 if hit(response) else None
        received = 0
        for piece in function(response, *args):
            yield piece
            received += len(piece)
            if end is not None and received >= end:
                die()

    return generated


def half_uploaded(function: Function, hit: Hit, die: Die) -> Function:
    """Kill the process when half of a reply's remaining bytes have been passed to the socket."""

    def generated(reply: bytes, start: int) -> Iterator[bytes]:
        end = (len(reply) - start) // 2 if hit(reply, start) else None
        sent = 0
        for piece in function(reply, start):
            if end is not None and sent + len(piece) > end:
                yield piece[: end - sent]
                die()
            yield piece
            sent += len(piece)

    return generated


def install(
    at: str, way: Way, of: Callable[..., bool], occurrence: int, delay: float, marker: Path
) -> None:
    """Let this process kill itself.

    Args:
        at: The function, as MODULE:NAME or MODULE:CLASS.NAME.
        way: The way to kill the process.
        of: The predicate of the calls that count; it is passed the positional arguments.
        occurrence: The number of the call, counted from 1.
        delay: The time in seconds that the thread waits before the process is killed.
        marker: The file that is written before the process is killed.
    """
    module, _, path = at.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for attribute in owners:
        owner = getattr(owner, attribute)
    calls = itertools.count(1)

    def hit(*args: Any) -> bool:
        return bool(of(*args)) and next(calls) == occurrence

    def die() -> None:
        marker.write_text(at)
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, way(getattr(owner, name), hit, die))

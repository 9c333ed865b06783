"""What the door carries, and what strangers and clients can make it and the SuperLink hold.

*calls* are small requests per second, as clients make them to look for orders; *push* and *pull*
are MB/s of objects of 5 MiB, as Flower cuts messages. Behind the door stands a plain server that
answers at once; clients, door and server share this machine. The base of every ratio is the same
load on the plain server itself.

Memory is resident, of a real SuperLink and of the door, before and after: *stranger*: 60 requests
of 10 MiB and 500 connections that say nothing, without a certificate; *client*: 64 connections of
one client that each push objects of 10 MiB as often as they are let.
"""

import asyncio
import multiprocessing
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvicorn
from common import MIB, options_of, resident, show, write

from coterie.network.door import Settings
from coterie.network.door_process import DoorProcess
from coterie.network.flower.link import SuperLink
from coterie.network.keys import Keys, Kit

OBJECT = 5 * MIB
LARGE = bytes(10 * MIB)
LOADS = {"calls": (b"x" * 100, "pull-messages"), "push": (bytes(OBJECT), "push-object")}
PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
LOADS["pull"] = (b"x" * 100, "pull-object")


async def plain(scope: dict, receive: Callable, send: Callable) -> None:
    """An ASGI application in the SuperLink's place: objects for `pull-object`, else a few bytes."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    body = bytes(OBJECT) if scope["path"].endswith("pull-object") else b"ok"
    head = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": body})


def serve_plain(port: int, certificate: str, key: str) -> None:
    """Run the application."""
    uvicorn.run(
        plain, port=port, log_level="critical", ssl_certfile=certificate, ssl_keyfile=key, ws="none"
    )


@contextmanager
def upstream(keys: Keys) -> Iterator[int]:
    """The plain server in a process of its own; its port."""
    port = free_port()
    process = multiprocessing.Process(
        target=serve_plain, args=(port, str(keys.certificate), str(keys.key)), daemon=True
    )
    process.start()
    try:
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.join()


def session(port: int, context: ssl.SSLContext, most: int = 100) -> aiohttp.ClientSession:
    """Of a client that keeps at most so many connections; 0: any number."""
    connector = aiohttp.TCPConnector(ssl=context, limit=most)
    return aiohttp.ClientSession(f"https://localhost:{port}", connector=connector)


async def load(
    port: int, contexts: list[ssl.SSLContext], kind: str, seconds: float
) -> dict[str, float]:
    """So many clients ask as fast as they are answered: requests per second, and MB/s."""
    body, call = LOADS[kind]
    done = moved = 0

    async def client(context: ssl.SSLContext, end: float) -> None:
        nonlocal done, moved
        async with session(port, context) as asked:
            while time.monotonic() < end:
                async with asked.post(f"/v1/fleet/{call}", data=body) as answer:
                    got = await answer.read()
                    answer.raise_for_status()
                done += 1
                moved += len(body) + len(got)

    began = time.monotonic()
    await asyncio.gather(*(client(context, began + seconds) for context in contexts))
    took = time.monotonic() - began
    return {"requests": done / took, "MB": moved / took / 1e6}


def loads(port: int, contexts: list[ssl.SSLContext], seconds: float) -> dict[str, float]:
    """Every kind of load."""
    found = {kind: asyncio.run(load(port, contexts, kind, seconds)) for kind in LOADS}
    return {kind: of["requests" if kind == "calls" else "MB"] for kind, of in found.items()}


async def push_large(asked: aiohttp.ClientSession) -> None:
    """Push a large object, whatever comes of it."""
    with suppress(aiohttp.ClientError, OSError):
        async with asked.post("/v1/fleet/push-object", data=LARGE, headers=PROTOBUF) as answer:
            await answer.read()


async def strangers(port: int, authority: Path) -> None:
    """Requests and connections without a certificate."""
    context = ssl.create_default_context(cafile=authority)
    with ExitStack() as open_ones:
        for _ in range(500):
            with suppress(OSError):
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        async with session(port, context, most=0) as asked:
            await asyncio.gather(*(push_large(asked) for _ in range(60)))


async def greedy(port: int, kit: Kit, seconds: float) -> None:
    """A client that pushes as much as it can."""

    async def push(asked: aiohttp.ClientSession, end: float) -> None:
        while time.monotonic() < end:
            await push_large(asked)
            await asyncio.sleep(0.01)

    end = time.monotonic() + seconds
    async with session(port, kit.context(), most=0) as asked:
        await asyncio.gather(*(push(asked, end) for _ in range(64)))


async def peaks(pids: dict[str, int], work: Coroutine[Any, Any, None]) -> dict[str, float]:
    """Do some work; the largest resident memory of processes meanwhile, in MiB."""
    task, largest = asyncio.create_task(work), dict.fromkeys(pids, 0.0)
    while not task.done():
        for name, pid in pids.items():
            largest[name] = max(largest[name], resident("VmRSS", pid) / MIB)
        await asyncio.sleep(0.05)
    await task
    return largest


def memory(folder: Path, keys: Keys, seconds: float) -> dict[str, dict[str, float]]:
    """Of a SuperLink and its door, under abuse, in MiB."""
    found: dict[str, dict[str, float]] = {}
    superlink = SuperLink(folder / "flower", keys, "127.0.0.1:0", 256 * MIB)
    port = superlink.door.listening.getsockname()[1]
    kit = Kit.load(folder / "0.key")
    works = {
        "client": lambda: greedy(port, kit, seconds),
        "stranger": lambda: strangers(port, keys.ca),  # whose address is then no longer heard
    }
    with superlink:
        time.sleep(2)
        pids = {"SuperLink": superlink.process.pid, "door": superlink.door.process.pid}
        found["before"] = {name: resident("VmRSS", pid) / MIB for name, pid in pids.items()}
        for name, work in works.items():
            found[name] = asyncio.run(peaks(pids, work()))
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    """Measure and print."""
    parser = options_of(__doc__, threads=False)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 100])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        keys, loopback = Keys.create(folder / "keys"), Keys.create(folder / "loopback")
        for number in range(max(options.clients)):
            keys.add(str(number), folder / f"{number}.key")
        contexts = [Kit.load(folder / f"{n}.key").context() for n in range(max(options.clients))]
        direct = ssl.create_default_context(cafile=loopback.ca)
        found: dict[str, dict[str, dict[str, float]]] = {}
        with upstream(loopback) as behind:
            log = str(folder / "door.log")
            settings = Settings(str(keys.folder), behind, str(loopback.ca), 10 * MIB, 10**12, log)
            door = DoorProcess("127.0.0.1:0", settings)
            port = door.listening.getsockname()[1]
            with door:
                for count in options.clients:
                    found[str(count)] = {
                        "plain": loads(behind, [direct] * count, options.seconds),
                        "door": loads(port, contexts[:count], options.seconds),
                    }
        held = memory(folder, keys, options.seconds)
    rows = []
    for count, ways in found.items():
        for way, of in ways.items():
            rows.append((count, way, *(f"{of[kind]:.0f}" for kind in LOADS)))
        ratios = (f"{ways['door'][kind] / ways['plain'][kind]:.2f}" for kind in LOADS)
        rows.append(("", "ratio", *ratios))
    show("Loads", ("clients", "", "calls/s", "push MB/s", "pull MB/s"), rows)
    rows = [(name, f"{of['SuperLink']:.0f}", f"{of['door']:.0f}") for name, of in held.items()]
    show("Resident memory, MiB", ("", "SuperLink", "door"), rows)
    write(options, loads=found, memory=held)


if __name__ == "__main__":
    main()

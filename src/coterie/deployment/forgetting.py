"""A client leaves a deployed run: what its server keeps of it is deleted."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.engines.runtime import TRANSFORMS
from coterie.errors import CoterieError
from coterie.files import read_inside, write_text
from coterie.messages import Json, State, without
from coterie.messages.names import BYTES_UP, LEFT_OUT, TEST
from coterie.runs import RunFolder

LOGS = ("server.log", "server.log.1", "flower/door.log", "flower/door.log.1")
BY_CLIENT = {"trained", "aggregated", "kept", "left_out"}
"""Parts of a result."""
DRAWN = ("report", "table.md")
"""What was made of the figures, and can be made again."""


@dataclass(frozen=True)
class Forgotten:
    """What was deleted of a client, and what stays."""

    figures: int
    lines: int
    """Of logs."""
    rounds: list[int]
    """In which its uploads counted; the first is 1."""


def known(folder: RunFolder, client: str) -> None:
    """Raise CoterieError unless a folder is of a server whose run a client may take part in."""
    description = folder.description
    names = sorted(description["clients"])
    if "run" not in description or any(folder.has(f"client-{n}") for n in names):
        raise CoterieError(f"{folder.path} is not the folder of a server's run.")
    if client not in names and not description["config"]["deployment"]["anyone"]:
        raise CoterieError(
            f"The run in {folder.path} has no client {client!r} (clients: {', '.join(names)})."
        )


def forget(folder: RunFolder, client: str) -> Forgotten:
    """Delete what the run folder of a server that has stopped keeps of a client, and expel it.

    Raises CoterieError if the server is working, or if a checkpoint is damaged.
    """
    known(folder, client)
    with folder.lock():
        folder.expel(client)
        if folder.checkpoints():
            folder.change(lambda name, state: _less(name, state, client))
        if folder.result is not None:
            of_clients = {
                k: without(folder.result[k], client) for k in BY_CLIENT & {*folder.result}
            }
            folder.finish({**folder.result, **of_clients})
        for name in DRAWN:
            path = folder.path / name
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
        cut = sum(_forget_lines(folder.path, log, client) for log in LOGS)
        lines = list(folder.metrics())
        mine = [line for line in lines if line["client"] == client]
        folder.rewrite(_less_of(line, client) for line in lines if line["client"] != client)
    sent, left_out = (
        {line["round"] for line in mine if line["name"] == name} for name in (BYTES_UP, LEFT_OUT)
    )
    return Forgotten(len(mine), cut, sorted(round + 1 for round in sent - left_out))


def _less_of(line: Mapping[str, Any], client: str) -> dict[str, Any]:
    """A figure of others, which may say something of each client; scores do not."""
    if line["name"].startswith(TEST):
        return {**line}
    return {**line, "value": without(line["value"], client)}


def _less(name: str, state: State, client: str) -> State:
    """Return a state without a client."""
    if name == "server":
        return state.without(client)
    if name == TRANSFORMS:  # each remembers something of clients
        less = state.without(client)
        return replace(less, parts={n: _less(name, p, client) for n, p in less.parts.items()})
    if name == "engine":
        hellos = {n: hello for n, hello in state["hellos"].items() if n != client}
        stopped: Json = [n for n in state.values["stopped"] if n != client]
        values = {**state.without(client).values, "stopped": stopped}
        return State({"hellos": hellos}, values)
    return state


def _forget_lines(folder: Path, log: str, client: str) -> int:
    """Remove the lines that contain a client's name, in whatever words; return how many."""
    try:
        text = read_inside(folder, log).decode(errors="replace")
    except FileNotFoundError:
        return 0
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if client not in line]
    write_text(folder / log, "".join(kept))
    return len(lines) - len(kept)

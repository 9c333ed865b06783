"""A client leaves a deployed run: what its server keeps of it is deleted."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from coterie.engines.part import LEFT_OUT
from coterie.errors import CoterieError
from coterie.exchange import Json, State, without
from coterie.files import hand_over, write_text
from coterie.runs import RunFolder

LOGS = ("server.log", "flower/door.log")
DRAWN = ("report", "table.md")
"""What was made of the figures, and can be made again."""


@dataclass(frozen=True)
class Forgotten:
    """What was deleted of a client, and what stays."""

    checkpoints: int
    figures: int
    lines: int
    """Of logs."""
    rounds: list[int]
    """In which its uploads were averaged in; the first is 1."""


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
        for checkpoint in folder.checkpoints():
            folder.change(checkpoint, lambda name, state: _less(name, state, client))
        lines = list(folder.metrics())
        mine = [line for line in lines if line["client"] == client]
        sent, left_out = (
            {line["round"] for line in mine if line["name"] == name}
            for name in ("bytes/up", LEFT_OUT)
        )
        folder.rewrite(without(line, client) for line in lines if line["client"] != client)
        if folder.result is not None:
            folder.finish(without(folder.result, client))
        for name in DRAWN:
            path = folder.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        cut = sum(_forget_lines(folder.path / log, client) for log in LOGS)
        for path in folder.path.rglob("*"):
            hand_over(path)
    rounds = sorted(round + 1 for round in sent - left_out)
    return Forgotten(len(folder.checkpoints()), len(mine), cut, rounds)


def _less(name: str, state: State, client: str) -> State:
    """A state without a client; those of optimisers are of means alone."""
    if name == "server":
        return state.without(client)
    if name == "engine":
        hellos = {n: hello for n, hello in state["hellos"].items() if n != client}
        stopped: Json = [n for n in state.values["stopped"] if n != client]
        values = {**state.without(client).values, "stopped": stopped}
        return State({"hellos": hellos}, values)
    return state


def _forget_lines(log: Path, client: str) -> int:
    """Remove the lines that name a client; how many."""
    if not log.exists():
        return 0
    names = re.compile(rf"(?<![\w.-]){re.escape(client)}(?![\w-])")
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not names.search(line)]
    write_text(log, "".join(kept))
    return len(lines) - len(kept)

"""Deletion of the data that a server stores about a client that leaves a deployed run."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.engines.client_host import TRANSFORMS
from coterie.errors import CoterieError, plural
from coterie.exchanges.lazy import PART
from coterie.exchanges.waiting import WAITING
from coterie.files import read_inside, write_text
from coterie.messages import Json, State, without
from coterie.messages.names import BYTES_UP, LEFT_OUT, TEST
from coterie.runs import RECEIVED, RunFolder, turn_of

LOGS = ("server.log", "server.log.1")
BY_CLIENT = {"trained", "aggregated", "kept", "left_out"}
"""Keys of result.json whose values are mappings with clients' names as keys."""
DERIVED = ("report", "table.md", "status.json")
"""Files and folders that can be generated again."""


@dataclass(frozen=True)
class Forgotten:
    """A report on the deletion of a client's data."""

    metrics: int
    """The number of deleted lines of metrics.jsonl."""
    log_lines: int
    """The number of deleted lines of logs."""
    rounds: list[int]
    """The rounds whose aggregates contain an upload of the client; the first round is 1."""


def check_participant(folder: RunFolder, client: str) -> None:
    """Check that a folder belongs to a server's run, and that a client can take part in this run.

    Args:
        folder: The run folder.
        client: The client's name.

    Raises:
        CoterieError: The folder belongs to no server, or the run has no such client.
    """
    description = folder.description
    if "run" not in description or any(folder.has(f"client-{n}") for n in description["clients"]):
        raise CoterieError(f"{folder.path} is not the folder of a server's run.")
    names = participants(folder)
    if client not in names and not description["config"]["deployment"]["anyone"]:
        raise CoterieError(
            f"The run in {folder.path} has no client {client!r} (clients: "
            f"{', '.join(sorted(names))})."
        )


def participants(folder: RunFolder) -> set[str]:
    """Return the clients that a server's run lists or that joined it later, also expelled ones."""
    engine = folder.find("engine")
    joined = set() if engine is None else engine["hellos"].keys()
    return folder.description["clients"].keys() | joined | folder.expelled()


def quorum_change(folder: RunFolder) -> str | None:
    """Return a sentence about the new quorum if the expulsion of clients has lowered the quorum.

    Otherwise, return None.
    """
    config = folder.description["config"]
    quorum = config["deployment"]["quorum"]
    remaining = len(participants(folder) - folder.expelled())
    if quorum is None or config["deployment"]["anyone"] or remaining >= quorum:
        return None
    return (
        f"The run file asks for a quorum of {quorum}, but only {plural(remaining, 'client')} "
        f"{'remains' if remaining == 1 else 'remain'}; the quorum is {remaining} from now on."
    )


def forget(folder: RunFolder, client: str) -> Forgotten:
    """Delete the data about a client from the run folder of a stopped server; expel the client.

    Raises:
        CoterieError: The server is running, a checkpoint is damaged, or an upload of the client
            waits for a phase after training.
    """
    check_participant(folder, client)
    with folder.lock():
        saved = folder.load("server") if folder.checkpoints() else None
        if saved is not None and client in saved.values.get(WAITING, {}):
            raise CoterieError(
                f"An upload of {client} waits for the end of an exchange. Resume the run until the "
                "round is complete, or return to an earlier round with --from-round; then repeat "
                "this command."
            )
        folder.expel(client)
        if saved is not None:
            parts = {*_texts(saved.without(client).values)}
            folder.change(lambda name, state: _state_without(name, state, client, parts))
        if folder.result is not None:
            remaining = {k: without(folder.result[k], client) for k in BY_CLIENT & {*folder.result}}
            folder.finish({**folder.result, **remaining})
        if client in (received := folder.listed(RECEIVED)):
            folder.write_list(RECEIVED, received - {client})
        for name in DERIVED:
            path = folder.path / name
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
        log_lines = sum(_forget_lines(folder.path, log, client) for log in LOGS)
        lines = list(folder.metrics())
        deleted = [line for line in lines if line["client"] == client]
        folder.rewrite(_line_without(line, client) for line in lines if line["client"] != client)
    sent, left_out = (
        {turn_of(line): line["round"] for line in deleted if line["name"] == name}
        for name in (BYTES_UP, LEFT_OUT)
    )
    rounds = {round + 1 for turn, round in sent.items() if turn not in left_out}
    return Forgotten(len(deleted), log_lines, sorted(rounds))


def _line_without(line: Mapping[str, Any], client: str) -> dict[str, Any]:
    """Return a copy of a line of metrics.jsonl without the values about a client.

    The line was recorded for another client or for the whole run. Only a value that is a mapping
    with clients' names as keys can contain values about `client`. A line with test scores is
    returned unchanged. The keys of its value are names of metrics, and a client could by chance
    have the same name as a metric.
    """
    if line["name"].startswith(TEST):
        return {**line}
    return {**line, "value": without(line["value"], client)}


def _texts(value: Json) -> Iterator[str]:
    """Yield all strings in a JSON value, except keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _state_without(name: str, state: State, client: str, parts: set[str]) -> State | None:
    """Return a checkpoint's state with all data about a client removed; None if nothing is left.

    Args:
        name: The name of the state in the checkpoint.
        state: The state.
        client: The client.
        parts: The names of the states with tensors of other clients.
    """
    if name.startswith(PART):
        return state if name.removeprefix(PART) in parts else None
    if name == "server":
        return state.without(client)
    if name == TRANSFORMS:
        own, clients = state.parts["own"].parts, state.parts["clients"].parts
        own = {key: memory.without(client) for key, memory in own.items()}
        clients = {
            other: State(part.groups, parts={k: m.without(client) for k, m in part.parts.items()})
            for other, part in clients.items()
            if other != client
        }
        return State(parts={"own": State(parts=own), "clients": State(parts=clients)})
    if name == "engine":
        hellos = {n: hello for n, hello in state["hellos"].items() if n != client}
        stopped: Json = [n for n in state.values["stopped"] if n != client]
        values = {**state.without(client).values, "stopped": stopped}
        return State({"hellos": hellos}, values)
    return state


def _forget_lines(folder: Path, log: str, client: str) -> int:
    """Delete the lines of a log that contain the client's name; return how many were deleted."""
    try:
        text = read_inside(folder, log).decode(errors="replace")
    except FileNotFoundError:
        return 0
    lines = text.splitlines(keepends=True)
    remaining = [line for line in lines if client not in line]
    write_text(folder / log, "".join(remaining))
    return len(lines) - len(remaining)

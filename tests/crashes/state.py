"""A state of a deployment in which a process is killed, and predicates of calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from crashes.ways import Way

CLIENTS = ("poet", "whaler")
ROUNDS = 3
FOLDER = "coterie.runs.folder"
RUN_FOLDER = f"{FOLDER}:RunFolder"


def every(*_: Any) -> bool:
    """Accept every call."""
    return True


def named(name: str) -> Callable[..., bool]:
    """Accept calls whose first argument is the path of a file with this name."""
    return lambda path, *_: path.name == name


is_complete = named("checksums.json")
"""Accepts calls that write the last file of a checkpoint."""


def is_state(path: Any, *_: Any) -> bool:
    """Accept calls that write a state of a checkpoint."""
    return path.suffix == ".safetensors"


def drops(folder: Any, checkpoints: Any) -> bool:
    """Accept calls of `RunFolder.drop` that delete a checkpoint."""
    return bool(checkpoints)


@dataclass(frozen=True)
class State:
    """A state in which a process is killed."""

    side: Literal["server", "client"]
    name: str
    at: str
    """The function in which the process kills itself, as MODULE:NAME or MODULE:CLASS.NAME."""
    way: Way
    times: int = 1
    """The number of times that a process reaches the state in an undisturbed run, at least."""
    of: Callable[..., bool] = every
    """The predicate of the calls that count, by their positional arguments."""
    first: "State | None" = None
    """The state in which the process was killed before; the second process is killed in this
    state. None: the first process is killed."""

    def __str__(self) -> str:
        return f"{self.side}: {self.name}"


def server(name: str, at: str, way: Way, times: int = 1, **more: Any) -> State:
    """Return a state in which the server is killed."""
    return State("server", name, at, way, times, **more)


def client(name: str, at: str, way: Way, times: int = 1, **more: Any) -> State:
    """Return a state in which a client is killed."""
    return State("client", name, at, way, times, **more)

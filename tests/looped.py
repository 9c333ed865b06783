"""Stops and comparisons of runs, and faults of deployments in one process."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from coterie.cli import app
from coterie.deployment.status import ServerWatch
from coterie.messages import Message, State
from coterie.messages.envelope import Reply, seal, unseal
from coterie.runs import Callback, RunFolder
from coterie.testing.loop import Loop, assert_same_states, flat

NAMES = ("diarist", "poet", "whaler")
"""The clients of most tests' runs."""


class StopAfter(Callback):
    """Interrupts a run at the end of a round."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds

    def on_round_end(self, round: int, scores: str) -> None:
        if round + 1 == self.rounds:
            raise KeyboardInterrupt


class Killed(BaseException):
    """The server's process ends."""


def kill(*_: object) -> None:
    raise Killed


class Notes(ServerWatch):
    """The lines that a server shows; a line that begins with `last` kills the server."""

    def __init__(self, last: str | None = None) -> None:
        self.lines: list[str] = []
        self.last = last

    def note(self, text: str) -> None:
        self.lines.append(text)
        if self.last is not None and text.startswith(self.last):
            raise Killed


@dataclass
class Spoilt:
    """A change of a network's replies: replies of a client to orders of a turn are spoilt."""

    spoil: Callable[[Reply, bytes], bytes]
    """The function that makes the bytes that arrive of a reply and its body."""
    turn: int
    times: float = 1
    """The number of replies that are spoilt."""
    client: str = "poet"
    kind: str = "step"
    count: int = 0

    def __call__(self, client: str, data: bytes) -> bytes:
        reply, body = unseal(Reply, data)
        at = client, reply.kind, reply.turn
        if at != (self.client, self.kind, self.turn) or self.count >= self.times:
            return data
        self.count += 1
        return self.spoil(reply, body)


def narrow(reply: Reply, body: bytes) -> bytes:
    """Return a reply whose first tensor of the adapter has lost most of its rows."""
    message = Message.decode(body)
    first = min(message["adapter"])
    adapter = {**message["adapter"], first: message["adapter"][first][:1]}
    groups = {**message.groups, "adapter": adapter}
    return seal(reply, Message(message.exchange, groups, message.values).encode())


def steps(loop: Loop) -> Counter[tuple[str, int]]:
    """Count how often each client was sent the step of each turn."""
    return Counter((name, order.turn) for name, order in loop.orders if order.kind == "step")


def steps_to(loop: Loop, client: str) -> list[int]:
    """Return the turns of the steps that a client was sent."""
    return [order.turn for to, order in loop.orders if (to, order.kind) == (client, "step")]


def result_of(folder: RunFolder) -> dict[str, Any]:
    """Return the result of a run that has ended."""
    result = folder.result
    assert result is not None
    return result


def assert_private(state: State, text: bytes, travelled: bytes) -> None:
    """Check that messages contain only shared parameters of CoMiGS, and nothing of a text.

    Args:
        state: A client's state.
        text: The client's text.
        travelled: All messages.
    """
    kinds: set[bool] = set()
    for path, part in state.walk():
        for (group, key), tensor in flat(part).items():
            data = tensor.contiguous().numpy().tobytes()
            shared = not path and group == "adapter" and key.startswith(("generalist", "dense"))
            if len(data) >= 64:
                assert (data in travelled) == shared, (path, group, key)
                kinds.add(shared)
    assert kinds == {True, False}
    assert not any(text[i : i + 40] in travelled for i in range(0, len(text) - 40, 40))


def succeed(*words: object) -> str:
    """Execute a command, which must succeed, and return its output with single spaces."""
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def entries(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics in order, without durations."""
    return [line for line in folder.metrics() if line["name"] != "seconds"]


def assert_same(actual: RunFolder, expected: RunFolder) -> None:
    """Compare the states, bit for bit, the metrics, the results, and the scores of windows."""
    assert_same_states(actual, expected)
    assert entries(actual) == entries(expected)
    results = [folder.outcome or {} for folder in (actual, expected)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}

"""A deployment in one process: a server and workers, with a network that can lose messages."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.bases import is_local, load_skeleton
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.server import ServerRun
from coterie.deployment.site import Site, run_folder
from coterie.deployment.status import ServerWatch
from coterie.federation.participants import served
from coterie.messages import Message, State
from coterie.messages.envelope import Order, unseal
from coterie.network.link import Link
from coterie.runs import RunFolder, describe

RUN = "0123456789abcdef"
"""The identifier of every run that this module deploys."""


@dataclass
class Loop(Link):
    """A `Link` to workers in this process.

    A worker executes an order when the reply to the order is requested.
    """

    largest = math.inf
    workers: dict[str, Worker]
    """A mapping from the clients' names to their workers."""
    events: Mapping[int, Callable[["Loop"], None]] = field(default_factory=dict)
    """Functions that `wait` calls. A key is the number of a call to `wait`, counted from 1."""
    away: set[str] = field(default_factory=set)
    """The clients that are disconnected."""
    lose: Callable[[str, Order], bool] = lambda *_: False
    """Function that returns whether a client's reply to an order is lost."""
    change: Callable[[str, bytes], bytes] = lambda _, data: data
    """Function that returns the bytes that the server receives instead of a client's reply."""
    orders: list[tuple[str, Order]] = field(default_factory=list)
    """The orders that were sent, each with the client's name."""
    seen: list[bytes] = field(default_factory=list)
    """The messages sent in both directions."""
    turns: int = 0
    """The number of calls to `wait`."""
    connections: dict[str, int] = field(default_factory=dict)
    """The number of times that each client has reconnected."""
    pending: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """A mapping from tickets to orders that have no reply yet.

    Each order is stored as the client's name and the bytes of the order.
    """

    def present(self) -> dict[str, str]:
        connected = self.workers.keys() - self.away
        return {name: str(self.connections.get(name, 0)) for name in connected}

    def send(self, client: str, data: bytes, turn: int, seconds: float) -> str:
        ticket = f"{client}-{self.turns}"
        self.pending[ticket] = client, data
        self.orders.append((client, unseal(Order, data)[0]))
        self.seen.append(data)
        return ticket

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        for ticket in list(tickets):
            name, data = self.pending.pop(ticket, ("", b""))
            if not name or name in self.away:
                continue
            reply = self.workers[name].answer(data)
            self.seen.append(reply)
            if not self.lose(name, unseal(Order, data)[0]):
                yield ticket, self.change(name, reply)

    def wait(self) -> None:
        self.turns += 1
        assert self.turns < 1000, "the run does not end"
        if self.turns in self.events:
            self.events[self.turns](self)

    def reconnect(self, name: str, worker: Worker | None = None) -> None:
        """Connect a client again.

        Args:
            name: The client's name.
            worker: A worker that replaces the client's worker, as if the client's process had
                restarted. By default, the client keeps its worker.
        """
        self.away.discard(name)
        self.connections[name] = self.connections.get(name, 0) + 1
        if worker is not None:
            self.workers[name].close()
            self.workers[name] = worker


def site(run: RunConfig, name: str, out: Path) -> Site:
    """Return the settings that a client keeps on its own machine.

    Args:
        run: The run file.
        name: The client's name.
        out: The folder in which the client's run folder is created.
    """
    [client] = [client for client in run.clients if client.name == name]
    root = run.root
    texts = {k: str(root / v) for k, v in client.model_dump().items() if k != "name" and v}
    public = None if run.data.public is None else str(root / run.data.public)
    spec = run.base_of(name)
    base = spec.name if is_local(spec.name) else None
    adapter = None if spec.adapter is None else str(root / spec.adapter)
    local = {"base": base, "public": public, "adapter": adapter, "device": run.device}
    return Site(name, texts, out, **local)


def workers(run: RunConfig, out: Path) -> dict[str, Worker]:
    """Create a worker for every client.

    Args:
        run: The run file.
        out: The folder in which the clients' run folders are created.

    Returns:
        A mapping from the clients' names to their workers.
    """
    return {c.name: Worker(site(run, c.name, out)) for c in run.clients}


def server(run: RunConfig, out: Path, loop: Loop, watch: ServerWatch | None = None) -> ServerRun:
    """Create the server of a run, or restore it from the newest checkpoint in its folder.

    Args:
        run: The run file.
        out: The server's run folder.
        loop: The `Loop` that connects the server to the clients' workers.
        watch: Object that receives the server's events; by default, the events are ignored.
    """
    folder = RunFolder(out)
    if not folder.is_run:
        names: dict[str, Any] = {client.name: {} for client in run.clients}
        description = {**describe(run.as_dict(), names, run.plugins, run=RUN), "threads": 1}
        folder = RunFolder.create(out, description)
    skeleton = load_skeleton(run.base, run.root)
    return ServerRun(run, skeleton, folder, loop, watch or ServerWatch(), served(run))


def deploy(run: RunConfig, out: Path, **network: Any) -> Loop:
    """Execute a deployed run from the beginning to the end.

    Args:
        run: The run file.
        out: The folder for the run folders of the clients and the server.
        **network: Arguments of the `Loop` that simulates the network. The argument `workers` is not
            permitted.

    Returns:
        The `Loop` after the run. Its attribute `seen` contains the messages that were sent.
    """
    loop = Loop(workers(run, out), **network)
    server(run, out / "server", loop).rounds()
    return loop


def folder(run: RunConfig, out: Path, name: str) -> RunFolder:
    """Return a client's run folder.

    Args:
        run: The run file.
        out: The folder that contains the run folder.
        name: The client's name.
    """
    return run_folder(site(run, name, out), RUN)


def assert_same_states(actual: RunFolder, expected: RunFolder) -> None:
    """Check that the newest checkpoints of two runs contain bit-identical states.

    The states of a checkpoint are those of the server, of all clients, and of each client's best
    model.

    Args:
        actual: The folder of one run.
        expected: The folder of the other run. All states in this folder must also exist in
            `actual`.
    """
    for side in sides(expected):
        assert_same_state(actual, expected, side)


def sides(folder: RunFolder) -> list[str]:
    """Return the sorted names of the newest checkpoint's states, such as `client-poet`."""
    return sorted(path.stem for path in folder.checkpoint(folder.turns()).glob("*.safetensors"))


def client_of(side: str) -> str:
    """Return the client to which a state of a checkpoint belongs; empty if it is the server's.

    Args:
        side: The name of the state, such as `client-poet` or `server-means-poet`.
    """
    kind, _, name = side.partition("-")
    return name if kind in ("client", "kept") else ""


def assert_same_state(actual: RunFolder, expected: RunFolder, side: str) -> None:
    """Check that a state is bit-identical in the newest checkpoints of two runs.

    Args:
        actual: The folder of one run.
        expected: The folder of the other run.
        side: The name of the state, such as `server` or `client-poet`.
    """
    assert_equal(actual.load(side), expected.load(side), side)


def assert_equal(actual: State, expected: State, side: str) -> None:
    """Check that two states have bit-identical tensors and equal values.

    Args:
        actual: One state.
        expected: The other state.
        side: A name for the states in error messages.
    """
    assert_same_tensors(actual, expected, side)
    expected_states = dict(expected.walk())
    for path, state in actual.walk():
        assert state.values == expected_states[path].values, (side, path)


def assert_same_tensors(actual: State, expected: State, side: str) -> None:
    """Check that the tensors of two states are bit-identical.

    Entries that are not tensors, such as secrets, may differ.

    Args:
        actual: One state.
        expected: The other state.
        side: A name for the states in error messages.
    """
    states, expected_states = dict(actual.walk()), dict(expected.walk())
    assert states.keys() == expected_states.keys(), side
    for path, state in states.items():
        tensors, expected_tensors = flat(state), flat(expected_states[path])
        assert tensors.keys() == expected_tensors.keys(), (side, path)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected_tensors[name]), (side, path, name)


def flat(state: State | Message) -> dict[tuple[str, str], torch.Tensor]:
    """Return a mapping from pairs (group, name) to the tensors of a state or message.

    The tensors of a state's nested states are left out. The tensors that other clients uploaded,
    which a message contains in its attribute `peers`, are also left out.
    """
    return {(g, name): t for g, tensors in state.groups.items() for name, t in tensors.items()}


def assert_as_local(run: RunConfig, out: Path, local: RunFolder) -> None:
    """Check that a deployment ended with the same states and results as a local run.

    Args:
        run: The run file.
        out: The folder with the run folders of the deployment.
        local: The folder of the local run.
    """
    for side in sides(local):
        name = client_of(side)
        deployed = folder(run, out, name) if name else RunFolder(out / "server")
        assert_same_state(deployed, local, side)
    for client in run.clients:
        result, expected = folder(run, out, client.name).outcome, local.outcome
        assert result is not None
        assert expected is not None
        for key in ("trained", "aggregated", *(["kept"] if "kept" in expected else [])):
            assert result[key] == {client.name: expected[key][client.name]}
        for point in ("trained", "aggregated"):
            items = expected["items"][point][client.name]
            assert result["items"][point] == {client.name: items}

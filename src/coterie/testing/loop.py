"""A deployment in one process: a server and workers, with a network that does as it is told."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from coterie.bases import is_folder, load_skeleton
from coterie.config.run import RunConfig
from coterie.deployment.client import Worker
from coterie.deployment.server import ServerRun, ServerWatch
from coterie.deployment.site import Site
from coterie.federation.participants import served
from coterie.messages import Message, State
from coterie.messages.envelope import Order, unseal
from coterie.runs import RunFolder, describe

RUN = "0123456789abcdef"


@dataclass
class Loop:
    """A `Link`: an order is carried out when its reply is asked for."""

    workers: dict[str, Worker]
    events: Mapping[int, Callable[["Loop"], None]] = field(default_factory=dict)
    """What happens, by the number of the turn."""
    away: set[str] = field(default_factory=set)
    lose: Callable[[str, Order], bool] = lambda *_: False
    """Whether the reply to an order is lost."""
    change: Callable[[str, bytes], bytes] = lambda _, data: data
    """What becomes of a reply on its way."""
    orders: list[tuple[str, Order]] = field(default_factory=list)
    seen: list[bytes] = field(default_factory=list)
    """Every message, both ways."""
    turns: int = 0
    lives: dict[str, int] = field(default_factory=dict)
    under_way: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def present(self) -> dict[str, str]:
        """See `Link`."""
        here = self.workers.keys() - self.away
        return {name: str(self.lives.get(name, 0)) for name in here}

    def send(self, client: str, data: bytes, round: int, seconds: float) -> str:
        """See `Link`."""
        ticket = f"{client}-{self.turns}"
        self.under_way[ticket] = client, data
        self.orders.append((client, unseal(Order, data)[0]))
        self.seen.append(data)
        return ticket

    def replies(self, tickets: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `Link`."""
        for ticket in list(tickets):
            name, data = self.under_way.pop(ticket, ("", b""))
            if not name or name in self.away:
                continue
            reply = self.workers[name].answer(data)
            self.seen.append(reply)
            if not self.lose(name, unseal(Order, data)[0]):
                yield ticket, self.change(name, reply)

    def wait(self) -> None:
        """See `Link`."""
        self.turns += 1
        assert self.turns < 1000, "the run does not end"
        if self.turns in self.events:
            self.events[self.turns](self)

    def again(self, name: str, worker: Worker | None = None) -> None:
        """A client comes back, perhaps as a new process."""
        self.away.discard(name)
        self.lives[name] = self.lives.get(name, 0) + 1
        if worker is not None:
            self.workers[name].close()
            self.workers[name] = worker


def site(run: RunConfig, name: str, out: Path) -> Site:
    """What a client of a run file brings."""
    [spec] = [client for client in run.clients if client.name == name]
    root = run.root
    texts = {k: str(root / v) for k, v in spec.model_dump().items() if k != "name" and v}
    public = None if run.data.public is None else str(root / run.data.public)
    base = run.base_of(name).name
    return Site(name, texts, out, base=base if is_folder(base) else None, public=public)


def workers(run: RunConfig, out: Path) -> dict[str, Worker]:
    """A process of every client."""
    return {c.name: Worker(site(run, c.name, out)) for c in run.clients}


def server(run: RunConfig, out: Path, loop: Loop, watch: ServerWatch | None = None) -> ServerRun:
    """The server of a run, from the newest checkpoint in its folder."""
    folder = RunFolder(out)
    if not folder.is_run:
        names: dict[str, Any] = {client.name: {} for client in run.clients}
        description = {**describe(run.as_dict(), names, run.plugins, run=RUN), "threads": 1}
        folder = RunFolder.create(out, description)
    skeleton = load_skeleton(run.base, run.root)
    return ServerRun(run, skeleton, folder, loop, watch or ServerWatch(), served(run))


def deploy(run: RunConfig, out: Path, **network: Any) -> Loop:
    """A whole run, to its end."""
    loop = Loop(workers(run, out), **network)
    server(run, out / "server", loop).rounds()
    return loop


def folder(run: RunConfig, out: Path, name: str) -> RunFolder:
    """A client's folder."""
    return RunFolder(out / f"{run.name}-{name}-{RUN[:8]}")


def assert_same_states(one: RunFolder, other: RunFolder) -> None:
    """The server and every client ended in the same bits, and kept the same models."""
    for side in sides(other):
        assert_same_state(one, other, side)


def sides(folder: RunFolder) -> list[str]:
    """The names of all states in the newest checkpoint."""
    return sorted(path.stem for path in folder.checkpoint(folder.rounds()).glob("*.safetensors"))


def assert_same_state(one: RunFolder, other: RunFolder, side: str) -> None:
    """One side ended in the same bits."""
    assert_equal(one.load(side), other.load(side), side)


def assert_equal(one: State, other: State, side: str) -> None:
    """Two states of one side are the same, bit for bit."""
    assert_same_tensors(one, other, side)
    theirs = dict(other.walk())
    for path, state in one.walk():
        assert state.values == theirs[path].values, (side, path)


def assert_same_tensors(one: State, other: State, side: str) -> None:
    """Two states have the same tensors, bit for bit; their values, such as secrets, may differ."""
    mine, theirs = dict(one.walk()), dict(other.walk())
    assert mine.keys() == theirs.keys(), side
    for path, state in mine.items():
        tensors, expected = flat(state), flat(theirs[path])
        assert tensors.keys() == expected.keys(), (side, path)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), (side, path, name)


def flat(state: State | Message) -> dict[tuple[str, str], torch.Tensor]:
    """Its own tensors by group and name, without those of its parts or peers."""
    return {(g, name): t for g, tensors in state.groups.items() for name, t in tensors.items()}


def assert_as_local(run: RunConfig, out: Path, local: RunFolder) -> None:
    """The server and every client ended in the bits, and with the entries, of the local engine."""
    for side in sides(local):
        name = side.partition("-")[2]
        mine = folder(run, out, name) if name else RunFolder(out / "server")
        assert_same_state(mine, local, side)
    for client in run.clients:
        result, expected = folder(run, out, client.name).outcome, local.outcome
        assert result is not None
        assert expected is not None
        for key in ("trained", "aggregated", *(["kept"] if "kept" in expected else [])):
            assert result[key] == {client.name: expected[key][client.name]}
        for point in ("trained", "aggregated"):
            mine = expected["items"][point][client.name]
            assert result["items"][point] == {client.name: mine}

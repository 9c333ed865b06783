"""Features of runs, and the ways to execute a run: each way ends with the bits of the local engine.

A cell of the table is a feature with a way. A feature's row names its ways; other cells have no
test of their own.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pytest
from diverging import WHO, broken
from every_method import BEHAVIOURS, FEW, METHODS, marks, run_of
from kept_runs import HIGH
from killed_servers import run_until_killed
from looped import NAMES, Killed, assert_same, entries, kill, result_of, steps
from small_models import write_assistant
from test_phases_after import Counted
from test_turns import Follow, OneFirst, StopIn, Twice, installed

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.client import Worker
from coterie.engines.clients import STATES
from coterie.messages import formats
from coterie.privacy import secrets
from coterie.runs import RunFolder
from coterie.testing.loop import (
    Loop,
    assert_as_local,
    assert_same_tensors,
    deploy,
    folder,
    server,
    sides,
    site,
    workers,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "transforms"
FAST, SLOW, THOROUGH = (), pytest.mark.slow, pytest.mark.thorough
SMALL = {"mlp": {"sets": 1, "rank": 2}, "attention": {"rank": 2}}
PREFERENCES = {"steps": 6, "batch": 4, "precision": "fp32", "learning_rate": 0.02}
DROPOUT = {"name": "comigs-1g1s", "lora": {"dropout": 0.2}, "router": {"every": 2, "steps": 2}}
DRAWING: dict[str, Any] = {
    **{"steps": 2, "batch": 3, "micro_batch": 2, "precision": "fp32", "sampling": "epochs"},
    **{"schedule": "one-cycle", "warmup": 0.4, "restart": True},
    **{"base_dropout": 0.1, "checkpointing": True},
}
"""Everything that draws in training, at once."""
CHATS = {"window": 40, "messages": True, "limits": {"validation": 3, "test": 3}}
GENERAL = ({"request": "Hello"}, {"request": "Why?"}, {"text": "It rains."})
REPLAY = {"steps": 2, "batch": 2, "precision": "fp32", "replay": {"start": 0.3, "text": GENERAL}}
FIGURES = ("loss", "test", "routing", "validation", "kept", "replay", "drift")


@dataclass(frozen=True)
class Make:
    """The fixtures of which features make runs."""

    values: Any
    config: Any
    teachers: Any
    broken: Any
    other: str
    folders: dict[str, Path]

    def run(self, **changes: Any) -> coterie.RunConfig:
        deployment = {"quorum": 3, "deadline": 60}
        whole = {"rounds": 2, "evaluation": {"every": 1}, "deployment": deployment}
        return self.config(**whole | changes)

    def kind(self, folder: str, data: dict[str, Any], **changes: Any) -> coterie.RunConfig:
        """Make a run on records of a folder."""
        names = NAMES[:2] if folder == "talks" else NAMES
        clients = [{"name": name, "path": f"{name}.jsonl"} for name in names]
        root = str(self.folders[folder])
        return self.config(
            **{"rounds": 2, "data_root": root, "data": data, "clients": clients} | changes
        )

    def transforms(self, *transforms: Any, **changes: Any) -> coterie.RunConfig:
        for file in sorted(EXAMPLES.glob("*.py")):
            load_plugin(file)
        coterie.register(Counted)
        rules = {"transforms": list(transforms), "largest_change": None}
        return self.run(aggregation=rules, **changes)

    def of(self, method: str) -> coterie.RunConfig:
        """Make a run of a method in which clients keep different models, and stop."""
        changes = {"rounds": 3, "evaluation": {"every": 2, "patience": 2}}
        training = HIGH | {"learning_rate": 0.3}
        return run_of(METHODS[method], self.values, self.teachers, training=training, **changes)

    def turns(self, method: Any) -> coterie.RunConfig:
        installed(type(method))
        return self.run(method=method, rounds=3)

    def bases(self, method: str, server: bool = True) -> coterie.RunConfig:
        """Make a run in which the poet has another base, as has the server if it has a model."""
        small = SMALL if method == "local" else {}
        limits = {"train": 2000, "validation": 400, "test": 400, "public": 300}
        data = {"data": {"window": 16, "limits": limits, "public": "diarist.txt"}}
        more = data | {"server": {"base": self.other, "test": "whaler.txt"}} if server else {}
        return self.run(method={"name": method} | small, bases={"poet": self.other}, **more)


NOISE = {"name": "clipped_gaussian", "epsilon": 1e4}
WHEN = {(WHO, round) for round in range(1, 9)}
FEATURES: dict[str, Callable[[Make], coterie.RunConfig]] = {
    "plain": lambda make: make.run(rounds=3),
    "checkpoints": lambda make: make.run(rounds=3, checkpoint={"every": 2}),
    "patience": lambda make: make.run(
        method="comigs-1g1s", rounds=4, training=HIGH, evaluation={"patience": 1}
    ),
    "kept": lambda make: make.run(method="comigs-1g1s", rounds=4, training=HIGH),
    "drawing": lambda make: make.run(method=DROPOUT, training=DRAWING),
    "server optimiser": lambda make: make.run(
        method="fedavg", rounds=3, aggregation={"optimiser": "fedyogi"}
    ),
    "two exchanges": lambda make: make.turns(Twice()),
    "one exchange more": lambda make: make.turns(OneFirst()),
    "median": lambda make: make.transforms("median"),
    "trimmed mean": lambda make: make.transforms({"name": "trimmed_mean", "trim": 0.3}),
    "my median": lambda make: make.transforms("my_median"),
    "noise": lambda make: make.transforms(NOISE),
    "int8": lambda make: make.transforms("int8"),
    "masks": lambda make: make.transforms("masked_sum"),
    "phase after": lambda make: make.transforms("counted"),
    "three transforms": lambda make: make.transforms(NOISE, "int8", "my_median"),
    "excluded": lambda make: make.run(
        training={"steps": 2, "batch": 2, "precision": "fp32", "learning_rates": {"whaler": 0.3}},
        deployment={"quorum": 2, "deadline": 60},
    ),
    "bases": lambda make: make.bases("local", server=False),
    "bases, local": lambda make: make.bases("local"),
    "bases, pretrained": lambda make: make.bases("pretrained"),
    "weights": lambda make: make.run(
        method="fedavg", data={"window": 16}, aggregation={"weights": "tokens"}
    ),
    "chats": lambda make: make.kind("talks", CHATS),
    "replay": lambda make: make.kind(
        "talks", CHATS, rounds=3, training=REPLAY, method="comigs-1g1s"
    ),
    "gate": lambda make: make.kind("talks", CHATS, base=write_assistant(make.other + "-chat")),
    "preferences": lambda make: make.kind(
        "opinions",
        {"window": 40, "preferences": True},
        method="comigs-1g1s",
        training=PREFERENCES | {"sampling": "epochs", "micro_batch": 3},
    ),
    "diverging": lambda make: make.broken("comigs-1g1s", evaluation={"every": 1, "patience": 3}),
    "always diverging": lambda make: make.broken(
        when=WHEN, rounds=5, evaluation={"every": 1, "patience": 2}
    ),
    **{f"diverging {name}": lambda make, name=name: make.broken(name) for name in sorted(FEW)},
    **{
        f"{count} diverging, {first}": lambda make, count=count, first=first: make.broken(
            when={(name, round) for name in NAMES[:count] for round in (first, first + 1)}
        )
        for count in (1, 2)
        for first in (0, 1)
    },
    **{name: lambda make, name=name: make.of(name) for name in METHODS},
}
SHOWN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "patience": lambda result: len({*result["kept"].values()}) > 1,
    "excluded": lambda result: {*result["left_out"]} == {"whaler"},
    "gate": lambda result: not any(result["drift"].values()),  # the base answers all requests
    **dict.fromkeys(("diverging", "always diverging"), lambda r: {*r["left_out"]} == {WHO}),
}
"""A predicate of the result of a feature's run."""


@dataclass(frozen=True)
class Cell:
    """A run, the run of the local engine to compare with, and a folder for another one."""

    run: coterie.RunConfig
    expected: RunFolder
    out: Path
    patch: pytest.MonkeyPatch


def resumed(cell: Cell, turns: Sequence[int] = (1,)) -> None:
    """Stop the run in the middle of turns, and continue it each time."""
    run, stopped = cell.run, RunFolder(cell.out / f"stopped-{turns[0]}")
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=stopped.path, callbacks=[StopIn(turns[0])])
    for number, following in zip_longest(turns, turns[1:]):
        turn, follow = run.turn(number), Follow()
        assert stopped.turns() == number
        assert any(side.startswith("server-waiting") for side in sides(stopped)) == turn.after
        assert not (stopped.path / STATES).exists()
        (stopped.path / STATES).mkdir()  # as a kill leaves it, with a file of no use
        (stopped.path / STATES / "client-poet.safetensors").write_bytes(b"damaged")
        if following is None:
            coterie.resume(stopped.path, callbacks=[follow])
            end = run.turn(cell.expected.turns() - 1).round + 1
        else:
            with pytest.raises(KeyboardInterrupt):
                coterie.resume(stopped.path, callbacks=[follow, StopIn(following - number)])
            end = run.turn(following).round
        assert (follow.started[0].done, follow.ended) == (turn.round, [*range(turn.round, end)])
    assert_same(stopped, cell.expected)


def resumed_in_each(cell: Cell) -> None:
    """Stop a run in its odd turns and another one in its even turns."""
    for first in (1, 2):
        resumed(cell, range(first, cell.expected.turns(), 2))


def one_in_memory(cell: Cell) -> None:
    """Keep one client in memory, and the states of the others on disk; then stop the run, too."""
    cell.patch.setattr("coterie.engines.local.free_memory", lambda: 0)
    done = RunFolder(coterie.run(cell.run, out=cell.out / "one").path)
    assert_same(done, cell.expected)
    assert not (done.path / STATES).exists()
    if cell.expected.turns() > 2:
        resumed(cell, [2])


def ray(cell: Cell) -> None:
    pytest.importorskip("ray")
    done = RunFolder(coterie.run(cell.run, out=cell.out / "ray", engine="ray").path)
    if not cell.run.aggregation.transforms:
        assert_same(done, cell.expected)
    assert entries(done) == entries(cell.expected)
    for side in sides(cell.expected):  # without secrets, which differ between processes
        assert_same_tensors(done.load(side), cell.expected.load(side), side)


def deployed(cell: Cell) -> None:
    """Execute a deployment in one process, in which each order is sent once."""
    cell.patch.setattr("coterie.deployment.seats.RETRY", 0.0)
    assert set(steps(deploy(cell.run, cell.out)).values()) == {1}
    result, expected = result_of(RunFolder(cell.out / "server")), result_of(cell.expected)
    assert result.get("left_out") == expected.get("left_out")
    lines = [line for line in cell.expected.metrics() if line["name"].startswith(FIGURES)]
    for client in cell.run.clients:
        own = folder(cell.run, cell.out, client.name).metrics()
        assert [line for line in own if line["name"].startswith(FIGURES)] == [
            line for line in lines if line["client"] == client.name
        ]
    assert_as_local(cell.run, cell.out, cell.expected)


def with_newer_clients(cell: Cell) -> None:
    """Execute a deployment whose clients have another version of the package."""
    answer = Worker.answer

    def newer(self: Worker, data: bytes) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(formats, "VERSION", "99.0.0")
            return answer(self, data)

    cell.patch.setattr(Worker, "answer", newer)
    loop = deploy(cell.run, cell.out)
    for version in ("99.0.0", formats.VERSION):
        assert any(version.encode() in data for data in loop.seen)
    assert_as_local(cell.run, cell.out, cell.expected)


def server_killed(cell: Cell, turns: Iterable[int], client: int | None = None) -> None:
    """Stop the server of a deployment in one process as a kill does, and start it again.

    Args:
        cell: The run.
        turns: The waits of the server in which it is killed, each in another deployment.
        client: The wait after the restart in which the poet's process restarts.
    """
    for turn in turns:
        out = cell.out / str(turn)
        clients = workers(cell.run, out)
        restart = {} if client is None else {client: partial(restarted, cell, out)}
        with pytest.raises(Killed):
            server(cell.run, out / "server", Loop(clients, {turn: kill})).rounds()
        server(cell.run, out / "server", Loop(clients, restart)).rounds()
        assert_as_local(cell.run, out, cell.expected)


def server_killed_in_each(cell: Cell) -> None:
    """Kill the server once in each of its waits, in as few deployments as possible.

    A server that has restarted completes as many turns as a round has before it is killed again.
    """
    turns = cell.expected.turns() // cell.run.rounds
    killed: set[tuple[int, int]] = set()
    for number in count():
        out, before = cell.out / str(number), len(killed)
        clients = workers(cell.run, out)
        while not run_until_killed(cell.run, clients, RunFolder(out / "server"), turns, killed):
            pass
        assert_as_local(cell.run, out, cell.expected)
        if len(killed) == before:
            break
    assert len(killed) > 5
    assert {turn for turn, _ in killed} == set(range(cell.expected.turns() + 1))


def restarted(cell: Cell, out: Path, loop: Loop) -> None:
    loop.reconnect("poet", Worker(site(cell.run, "poet", out)))


def client_killed(cell: Cell, turns: Iterable[int]) -> None:
    deploy(cell.run, cell.out, events=dict.fromkeys(turns, partial(restarted, cell, cell.out)))
    assert_as_local(cell.run, cell.out, cell.expected)


WAYS: dict[str, Callable[[Cell], None]] = {
    "resumed": resumed,
    "resumed in each turn": resumed_in_each,
    "resumed at the end": lambda cell: resumed(cell, [cell.expected.turns() - 1]),
    "one in memory": one_in_memory,
    "ray": ray,
    "deployed": deployed,
    "newer clients": with_newer_clients,
    "server killed": partial(server_killed, turns=(2, 4)),
    "server killed later": partial(server_killed, turns=(1, 3, 5)),
    "server killed in each turn": server_killed_in_each,
    "client killed": partial(client_killed, turns=(2, 4)),
    "client killed later": partial(client_killed, turns=(3, 5, 6)),
    "server and client killed": partial(server_killed, turns=(3,), client=2),
}
NO_PLUGIN = pytest.mark.skip(reason="Ray's workers cannot import a class of a test")
EACH_TURN = {"resumed in each turn": FAST}
TRANSFORM = {"resumed": FAST, "server and client killed": FAST}
PHASE = EACH_TURN | {"deployed": FAST, "server killed in each turn": FAST}
CELLS: dict[str, dict[str, Any]] = {
    "plain": {
        **{"deployed": FAST, "client killed": FAST, "client killed later": SLOW},
        **{"server killed": FAST, "server killed later": SLOW},
    },
    "checkpoints": {"ray": SLOW},
    "patience": {"resumed at the end": FAST, "deployed": FAST, "ray": SLOW},
    "kept": {"resumed at the end": SLOW},
    "drawing": {"resumed": SLOW, "deployed": SLOW},
    "server optimiser": TRANSFORM,
    "two exchanges": EACH_TURN | {"ray": NO_PLUGIN},
    "one exchange more": EACH_TURN | {"deployed": FAST, "ray": NO_PLUGIN},
    **dict.fromkeys(
        ("median", "trimmed mean", "my median", "noise", "three transforms"), TRANSFORM
    ),
    "int8": TRANSFORM | {"ray": SLOW},
    "masks": TRANSFORM | PHASE | {"ray": SLOW},
    "phase after": PHASE | {"ray": NO_PLUGIN},
    "excluded": {"deployed": FAST, "resumed": FAST},
    "bases": {"resumed": FAST},
    "bases, local": {"ray": SLOW},
    "bases, pretrained": {"ray": THOROUGH, "server killed": SLOW},
    "weights": {"resumed": FAST, "newer clients": SLOW},
    "chats": {"resumed": FAST},
    **{key: {"resumed": FAST, "deployed": FAST, "ray": SLOW} for key in ("gate", "replay")},
    "preferences": {"resumed": SLOW, "deployed": SLOW},
    "diverging": EACH_TURN | {"one in memory": FAST},
    "always diverging": {"deployed": FAST},
    **{f"diverging {name}": {"deployed": FAST, "ray": SLOW} for name in sorted(FEW)},
    **{f"{n} diverging, {first}": {"deployed": FAST} for n in (1, 2) for first in (0, 1)},
    **{
        name: {"one in memory": marks(name, {"fedavg", "comigs-1g1s"}, BEHAVIOURS)}
        for name in METHODS
    },
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """The run of a feature by the local engine, made once."""
    made: dict[str, RunFolder] = {}

    def make(feature: str, run: coterie.RunConfig) -> RunFolder:
        if feature not in made:
            out = tmp_path_factory.mktemp("local") / "run"
            made[feature] = RunFolder(coterie.run(run, out=out).path)
            assert feature not in SHOWN or SHOWN[feature](made[feature].result or {})
        return made[feature]

    return make


@pytest.mark.parametrize(
    ("feature", "way"),
    [
        pytest.param(feature, way, id=f"{feature}-{way}", marks=mark)
        for feature, ways in CELLS.items()
        for way, mark in ways.items()
    ],
)
def test_a_run_ends_in_the_same_bits(
    feature, way, values, config, teachers, other, talks, opinions, expected, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(secrets, "draw", lambda: bytes(secrets.KEY_BYTES))  # noise and keys
    folders = {"talks": talks, "opinions": opinions}
    broken_run = broken(values, teachers, tmp_path)
    run = FEATURES[feature](Make(values, config, teachers, broken_run, other, folders))
    WAYS[way](Cell(run, expected(feature, run), tmp_path, monkeypatch))

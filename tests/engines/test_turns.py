"""Rounds that consist of several exchanges, and exchanges that consist of several turns."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from looped import Notes, StopAfter

import coterie
from coterie.config.plugins import load_plugin
from coterie.deployment.forgetting import forget
from coterie.deployment.orders import check_turn
from coterie.errors import CoterieError
from coterie.inference.kept import Best
from coterie.messages import MessageError
from coterie.messages.envelope import Kind, Order
from coterie.methods.averaging import FedAvg
from coterie.methods.contract import Method
from coterie.methods.registry import METHODS
from coterie.runs import Callback, RunFolder, RunStart
from coterie.testing import loop
from coterie.turn import TRAIN

MASKED_SUM = Path(__file__).parents[2] / "examples" / "transforms" / "masked_sum.py"


class Twice(FedAvg):
    """Federated averaging with two exchanges per round."""

    name: ClassVar[str] = "twice"

    def exchanges(self, rounds: int) -> int:
        return 2 * rounds


class OneFirst(FedAvg):
    """Federated averaging with an additional exchange in the first round."""

    name: ClassVar[str] = "one-first"

    def exchanges(self, rounds: int) -> int:
        return rounds + 1


def installed(method: type[Method]) -> None:
    """Register a method, as a plugin does."""
    if not METHODS.is_installed(method):
        coterie.register(method)


class Follow(Callback):
    """Notes all calls."""

    def __init__(self) -> None:
        self.started: list[RunStart] = []
        self.ended: list[int] = []
        self.scored: list[int] = []
        self.uploads = Counter[int]()

    def on_run_begin(self, run: RunStart) -> None:
        self.started.append(run)

    def on_client_end(self, round: int, client: str) -> None:
        self.uploads[round] += 1

    def on_round_end(self, round: int, scores: str) -> None:
        self.ended.append(round)
        self.scored += [round] if scores else []


class StopIn(Follow):
    """Stops a run when the first client has finished in a turn."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        self.left, self.seen = turn, set[str]()

    def on_client_end(self, round: int, client: str) -> None:
        if client in self.seen:
            self.left, self.seen = self.left - 1, set()
        self.seen.add(client)
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("method", "rounds", "exchanges"),
    [(FedAvg(), 3, [1, 1, 1]), (Twice(), 3, [2, 2, 2]), (OneFirst(), 3, [2, 1, 1])],
)
@pytest.mark.parametrize("phases", [0, 1])
def test_turns_are_numbered_in_order(method, rounds, exchanges, phases, config) -> None:
    load_plugin(MASKED_SUM)
    transforms = phases * ["masked_sum"]
    run = config(method=method, rounds=rounds, aggregation={"transforms": transforms})
    expected: list[tuple[int, int, int, str, bool, bool, bool, bool]] = []
    exchange = 0
    for round, count in enumerate(exchanges):
        for number in range(count):
            for phase in run.phases:
                ends = phase == ("unmask" if phases else TRAIN)
                at = round, exchange, len(expected), phase
                expected.append((*at, number == 0, number == count - 1, phase == "unmask", ends))
            exchange += 1
        assert run.turns_in(round + 1) == len(expected)
    turns = [run.turn(number) for number in range(run.turns)]
    assert [
        (t.round, t.exchange, t.number, t.phase, t.first, t.last, t.after, t.closes) for t in turns
    ] == expected
    assert [turn.ends_round for turn in turns] == [at[5] and at[7] for at in expected]
    beyond = run.turn(run.turns)
    assert (beyond.round, beyond.exchange, run.turns_in(0)) == (rounds, exchange, 0)


@pytest.mark.parametrize("method", [FedAvg(), Twice(), OneFirst()])
def test_a_run_with_several_exchanges_per_round_counts_rounds(method, config, tmp_path) -> None:
    """Check the rounds in the progress, the metrics and the evaluations."""
    run = config(method=method, rounds=4, evaluation={"every": 2})
    follow = Follow()
    done = coterie.run(run, out=tmp_path / "run", callbacks=[follow])
    [start] = follow.started
    clients = len(start.clients)
    assert (start.rounds, start.done, start.turns, start.turns_done) == (4, 0, run.turns, 0)
    assert follow.ended == [0, 1, 2, 3]
    assert follow.scored == [2, 3]  # the model of round 1 after the next download, and the last
    exchanges = [run.turns_in(round + 1) - run.turns_in(round) for round in range(4)]
    assert follow.uploads == {round: n * clients for round, n in enumerate(exchanges)}
    lines = list(RunFolder(done.path).metrics())
    for point in ("trained", "aggregated"):
        scored = Counter(line["round"] for line in lines if line["name"] == f"test/{point}")
        assert scored == {1: clients, 3: clients}
    sent = Counter(line["round"] for line in lines if line["name"] == "bytes/up")
    assert sent == {round: n * clients for round, n in enumerate(exchanges)}


@pytest.mark.parametrize("method", [FedAvg(), Twice()])
@pytest.mark.parametrize("reports", ["trained", "aggregated"])
def test_patience_counts_rounds(method, reports, config, tmp_path, monkeypatch) -> None:
    """Check that the patience of a client whose model never improves is a number of rounds."""
    monkeypatch.setattr(type(method), "reports", reports)
    monkeypatch.setattr(Best, "order", lambda self: (0.0, self.round))
    run = config(method=method, rounds=6, evaluation={"patience": 2})
    done = coterie.run(run, out=tmp_path / "run")
    waited = 2 + (reports == "aggregated")
    assert RunFolder(done.path).turns() == run.turns_in(waited)


@pytest.mark.parametrize("method", [Twice(), OneFirst()])
def test_a_run_continues_from_an_earlier_round(method, config, tmp_path) -> None:
    installed(type(method))
    run = config(method=method, rounds=3, evaluation={"every": 1})
    with pytest.raises(KeyboardInterrupt):
        coterie.run(run, out=tmp_path / "back", callbacks=[StopAfter(2)])
    with pytest.raises(CoterieError, match=r"has no checkpoint of round 0 \(kept: "):
        coterie.resume(tmp_path / "back", from_round=0)
    if run.turns_in(2) - run.turns_in(1) == 1:  # the two newest checkpoints are kept
        coterie.resume(tmp_path / "back", from_round=1)
        whole = RunFolder(coterie.run(run, out=tmp_path / "whole").path)
        loop.assert_same_states(RunFolder(tmp_path / "back"), whole)


def test_a_deployment_counts_rounds(config, tmp_path) -> None:
    """Check the rounds in the status, the log, the orders, and when a client's data are deleted."""
    installed(Twice)
    run = config(method="twice", rounds=2, evaluation={"every": 1})
    local = RunFolder(coterie.run(run, out=tmp_path / "local").path)
    notes = Notes()
    network = loop.Loop(loop.workers(run, tmp_path))
    loop.server(run, tmp_path / "server", network, notes).rounds()
    loop.assert_as_local(run, tmp_path, local)
    ends = [line for line in notes.lines if "used" in line]
    assert [line.partition(":")[0] for line in ends] == ["round 1/2", "round 2/2"]
    assert {order.turn for _, order in network.orders if order.kind == "step"} == {0, 1, 2, 3}
    assert forget(RunFolder(tmp_path / "server"), "poet").rounds == [1, 2]


@pytest.mark.parametrize(
    ("kind", "turn", "counted", "text"),
    [
        ("step", 4, None, "'step' in round 3, but the run has only 2 rounds"),
        ("finish", 0, None, "'finish' in round 1, but the run has only 2 rounds"),
        ("finish", 5, None, "'finish' in round 3, but the run has only 2 rounds"),
        ("step", 2, 3, "for round 2 says that this client's upload was accepted in round 2"),
        ("step", 1, -2, "for round 1 says"),
    ],
)
def test_errors_about_orders_name_rounds(kind: Kind, turn, counted, text, config) -> None:
    run = config(method=Twice(), rounds=2)
    fields: dict[str, Any] = {"run": "0" * 16, "client": "poet", "counted": counted}
    with pytest.raises(MessageError, match=text):
        check_turn(Order(kind=kind, turn=turn, **fields), run)
    check_turn(Order(kind="step", turn=3, run="0" * 16, client="poet"), run)

"""Secrets: from their own source, one for each round, and the same again after a kill."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import coterie
from coterie.messages import Message, Schema, State
from coterie.messages.schema import Way
from coterie.privacy import secrets
from coterie.privacy.secrets import BITS, Secrets, draw
from coterie.runs import Callback, RunFolder
from coterie.testing.loop import assert_same_states
from coterie.testing.rounds import down, joined, one_round, step

NAMES = ["diarist", "poet", "whaler"]
Run = Callable[..., coterie.RunConfig]


class Killed(Exception):
    """What stops a run."""


@pytest.fixture
def drawn(monkeypatch) -> list[int]:
    """A fixed source of secrets; what was drawn of it."""
    found: list[int] = []

    def one() -> int:
        found.append(1000 + len(found))
        return found[-1]

    monkeypatch.setattr(secrets, "draw", one)
    return found


@pytest.fixture
def private(config) -> Run:
    """A run whose clients put noise on what they tell of their samples."""

    def make(noise: bool = True) -> coterie.RunConfig:
        embeddings = {"privacy": {"epsilon": 1.0} if noise else None}
        method = {"name": "fedamole", "experts": 6, "attention": {"rank": 4}}
        return config(method={**method, "embeddings": embeddings})

    return make


def test_the_operating_system_s_are_unlike_each_other() -> None:
    found = {draw() for _ in range(100)}
    assert len(found) == 100
    assert all(0 <= secret < 2**BITS for secret in found)
    assert max(found) > 2 ** (BITS - 8)


def test_each_round_has_its_own_and_keeps_it(drawn) -> None:
    mine = Secrets()
    found = [[mine.of(round) for _ in range(3)] for round in range(4)]
    assert all(len(set(again)) == 1 for again in found)
    assert [again[0] for again in found] == [1000, 1001, 1002, 1003]
    assert len(drawn) == 5  # one ahead


def test_the_next_round_s_is_in_the_state_and_older_ones_are_not(drawn) -> None:
    mine = Secrets()
    first = mine.state()
    assert list(first.values()) == drawn[:1]
    for round in range(4):
        here = mine.of(round)
        state = mine.state()
        assert {int(number) for number in state} == {round, round + 1}
        after = Secrets()
        after.restore(state)
        assert after.of(round) == here
        assert after.of(round + 1) == mine.of(round + 1)
        after.restore(state)
        assert after.state() == state


def test_a_round_that_was_left_out_has_a_secret_too(drawn) -> None:
    mine = Secrets()
    before = mine.of(0)
    later = mine.of(5)
    assert later not in (before, drawn[1])
    assert mine.state() == {"5": later, "6": drawn[-1]}


def test_a_client_s_state_holds_them_where_it_has_noise_to_draw(private) -> None:
    local, plain = joined(private()), joined(private(noise=False))
    one_round(local, 0)
    for name in NAMES:
        state = local.clients[name].state()
        assert state.values["secrets"].keys() == {"0", "1"}
        assert State.decode(state.encode()).values == state.values
        assert "secrets" not in plain.clients[name].state().values


@pytest.mark.slow
def test_noise_is_of_the_secret_and_not_of_the_run_s_seed(private, monkeypatch) -> None:
    def told(secret: int, run: coterie.RunConfig) -> torch.Tensor:
        monkeypatch.setattr(secrets, "draw", lambda: secret)
        tokens = one_round(joined(run), 0)["poet"]["tokens"]
        return torch.cat([tokens[path] for path in sorted(tokens)])

    run = private()
    assert torch.equal(told(1, run), told(1, run))
    assert not torch.equal(told(1, run), told(2, run))


def test_no_message_and_no_server_s_state_holds_one(private, monkeypatch) -> None:
    drawn: list[int] = []

    def one() -> int:
        drawn.append(4_200_000_000_000_042 + len(drawn) * 10**9)
        return drawn[-1]

    monkeypatch.setattr(secrets, "draw", one)
    local = joined(private())
    for round in range(2):
        local.server.start_round(round, NAMES)
        for name in NAMES:
            told = [down(local, name), step(local, name, round)]
            assert not any(str(n).encode() in m.encode() for n in drawn for m in told)
        assert any(str(n).encode() in local.clients["poet"].state().encode() for n in drawn)
        assert not any(str(n).encode() in local.server.state().encode() for n in drawn)


def killed_after(rounds: int, run: coterie.RunConfig, path: Path) -> RunFolder:
    """The folder of a run that was stopped after so many rounds."""

    class Stop(Callback):
        def on_round_end(self, round: int, scores: str) -> None:
            if round + 1 == rounds:
                raise Killed

    with pytest.raises(Killed):
        coterie.run(run, out=path, callbacks=[Stop()])
    folder = RunFolder(path)
    assert folder.rounds() == rounds
    return folder


@pytest.mark.slow
def test_with_a_fixed_source_a_resumed_run_ends_in_the_same_bits(
    private, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr(secrets, "draw", lambda: 42)
    coterie.run(private(), out=tmp_path / "whole")
    cut = killed_after(1, private(), tmp_path / "cut")
    coterie.resume(cut.path)
    assert_same_states(cut, RunFolder(tmp_path / "whole"))


@pytest.mark.slow
def test_the_round_that_was_cut_off_is_done_with_the_secret_that_it_had(
    private, monkeypatch, tmp_path
) -> None:
    """With the real source: by hand from the checkpoint, and by the run that goes on from it."""
    run = private()
    cut = killed_after(1, run, tmp_path / "cut")
    by_hand = []
    for _ in range(2):
        local = joined(run)
        local.server.restore(cut.load("server"))
        for name in NAMES:
            local.clients[name].restore(cut.load(f"client-{name}"))
        by_hand.append({n: up.encode() for n, up in one_round(local, 1).items()})
    assert by_hand[0] == by_hand[1]
    sent: list[bytes] = []
    send = Schema.send

    def seen(schema: Schema, way: Way, message: Message) -> bytes:
        data = send(schema, way, message)
        sent.extend([data] if way == "up" else [])
        return data

    monkeypatch.setattr(Schema, "send", seen)
    coterie.resume(cut.path)
    assert dict(zip(NAMES, sent[: len(NAMES)], strict=True)) == by_hand[0]
    assert len(sent) == 2 * len(NAMES)


def test_two_runs_have_other_noise(private) -> None:
    one, other = (one_round(joined(private()), 0)["poet"] for _ in range(2))
    for path, mean in one["tokens"].items():
        assert not torch.equal(mean, other["tokens"][path])
    for name, tensor in one["adapter"].items():  # of what has none, nothing changes
        assert torch.equal(tensor, other["adapter"][name])

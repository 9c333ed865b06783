"""Bounds over several rounds: clients that still learn, and clients that become hostile."""

from collections.abc import Mapping

import pytest
import torch
from both_ends import exchange_of

from coterie.exchanges.exchange import Exchange
from coterie.exchanges.spec import AggregationSpec
from coterie.messages import Field, Groups, Message, Schema
from coterie.turn import Turn

SCHEMA = Schema(up=(Field("p", "pairs", reduce="mean"),), down=(Field("p", "pairs"),))
START: Groups = {"p": {"w": torch.zeros(64)}}


def server() -> Exchange:
    exchange = exchange_of(SCHEMA, rules=AggregationSpec())
    exchange.strict = False
    return exchange


def take(running: Exchange, number: int, sizes: Mapping[str, float], count: int = 64) -> set[str]:
    """Take changes of these sizes to the first parameters; return the clients that are excluded.

    No two clients' changes have the same direction.
    """
    running.open(Turn(number, number, number), sizes)
    running.begin()
    for name, size in sizes.items():
        change = torch.zeros(count)
        change["abcd".index(name)] = size
        running.put(name, Message(0, {"p": {"w": change}}), lambda *_: START)
    running.settle()
    return set(running.refused)


def exchange(running: Exchange, number: int, sizes: dict[str, float], count: int = 64) -> set[str]:
    """Take changes as `take` does, and end the exchange."""
    refused = take(running, number, sizes, count)
    running.transforms.commit(running.counted)
    return refused


def change_of(running: Exchange, client: str) -> float:
    """Return the norm of the change that counts in the mean."""
    return float(running._stored(client).read()["p"]["w"].norm())


def excluded(*rounds: dict[str, float]) -> list[set[str]]:
    running = server()
    return [exchange(running, number, sizes) for number, sizes in enumerate(rounds)]


LEARNT = [1.69, 1.25, 0.63, 0.31, 0.15, 0.07, 0.03]
"""Sizes of the changes of clients that have soon learnt all that their text teaches: preferences
for short answers, measured with CoMiGS-1G1S."""
LEARNS = [1.38, 1.05, 0.98, 0.72, 0.60, 0.50, 0.40]
"""The run with preferences for long answers, which takes longer."""


def rounds_of(learners: str) -> list[dict[str, float]]:
    pairs = zip(LEARNT, LEARNS, strict=True)
    return [{n: large if n in learners else small for n in "abcd"} for small, large in pairs]


@pytest.mark.parametrize("learners", ["d", "cd"])
def test_who_still_learns_is_not_excluded_by_those_who_have_learnt(learners: str) -> None:
    rounds = rounds_of(learners)
    running = server()
    for number, sizes in enumerate(rounds):
        assert not exchange(running, number, sizes)
        assert change_of(running, "d") == pytest.approx(sizes["d"])  # nor is it scaled
    late = server()  # this server remembers nothing
    assert exchange(late, 4, rounds[4]) == ({"d"} if learners == "d" else set())
    assert learners == "d" or change_of(late, "d") < 0.9 * rounds[4]["d"]


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("shrinks", [1.0, 0.9, 0.5])
def test_a_client_that_becomes_hostile_is_excluded_at_once(turns: int, shrinks: float) -> None:
    rounds = [dict.fromkeys("abcd", shrinks**number) for number in range(8)]
    for sizes in rounds[turns:]:
        sizes["d"] *= 9
    assert excluded(*rounds) == [set() if number < turns else {"d"} for number in range(8)]


def test_a_change_cannot_grow_from_round_to_round() -> None:
    growth = [2.9**number for number in range(1, 5)]
    rounds = [{"a": 1.0, "b": 1.0, "c": 1.0, "d": size} for size in growth]
    assert excluded(*rounds) == [set(), {"d"}, {"d"}, {"d"}]


def test_changes_of_fewer_parameters_are_compared_with_one_another() -> None:
    # The method trains more parameters in every second round.
    running = server()
    for number, size in enumerate([8.0, 1.0, 8.0, 1.0]):
        hostile = 2.0 if number == 0 else 4.0  # within the bound at first
        sizes = {"a": size, "b": size, "c": size, "d": hostile * size}
        refused = exchange(running, number, sizes, 64 if number % 2 else 32)
        assert refused == (set() if number == 0 else {"d"})


def test_after_an_exclusion_only_the_median_counts() -> None:
    small = {"a": 0.1, "b": 0.1, "c": 0.1}
    rounds = [dict.fromkeys("abcd", 1.0), {**small, "d": 9.0}, {**small, "d": 1.0}]
    assert excluded(*rounds) == [set(), {"d"}, {"d"}]


def test_a_repeated_exchange_uses_what_was_remembered_before_it() -> None:
    once, again = server(), server()
    for number, sizes in enumerate(rounds_of("d")):
        exchange(once, number, sizes)
        take(again, number, {n: 100 * size for n, size in sizes.items()})
        exchange(again, number, sizes)
        assert again.transforms.state() == once.transforms.state()


def test_what_is_remembered_survives_a_restart_and_goes_with_the_client() -> None:
    running, restarted = server(), server()
    exchange(running, 0, dict.fromkeys("abcd", 1.0))
    restarted.transforms.restore(running.transforms.state())
    small = {"a": 0.1, "b": 0.1, "c": 0.1, "d": 0.5}
    assert not exchange(restarted, 1, small)
    restarted.transforms.leave("d")
    assert exchange(restarted, 2, small) == {"d"}
    values = [state.values for _, state in restarted.transforms.state().walk()]
    assert "'c': " in str(values)
    assert "'d': {'" not in str(values)

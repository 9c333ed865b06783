"""Auto: what a client receives of others if it chooses its weights to read their uploads."""

import math
from typing import Any

import pytest
from auto_runs import auto, chosen, forged_round, started
from hypothesis import given
from hypothesis import strategies as st
from tensors import equal
from turns import nth

from coterie.messages import Message
from coterie.methods.auto.choice import row_of, with_least_others
from coterie.testing.rounds import down

TEXTS = {"ann": "poet", "ben": "whaler", "eve": "poet", "ida": "diarist"}
NAMES = [*TEXTS]


def curious(upload: Message) -> Message:
    """Ask for ann's parameters and a trial, as the server once believed."""
    forged = chosen(upload, row={"ann": 1.0, "ben": 1e-9, "eve": 0.0})
    forged.values["choice"].pop("trial", None)
    return forged


@pytest.fixture
def make(config):
    def make(least_others: int = 1) -> Any:
        method, rules = auto(samples=2), {"least_others": least_others}
        return started(config, TEXTS, method=method, rounds=8, aggregation=rules)

    return make


def test_a_client_receives_pairs_once_per_trial_and_no_weights_in_between(make) -> None:
    local, pairs, rows = make(), [], []
    for r in range(8):
        downloads, _ = forged_round(local, r, {"eve": curious})
        pairs.append(bool(downloads["eve"].peers))
        rows.append(local.server.rows(local.value, local.exchange)["eve"])
    assert [r for r, peers in enumerate(pairs) if peers] == [1, 3, 7]
    assert rows[0] == pytest.approx(dict.fromkeys(NAMES, 1 / 4), abs=0.1)
    assert all(row["ann"] == 1.0 for row in rows[1:])  # the limit of 1 permits this


def test_weights_change_only_in_a_trial(make) -> None:
    local = make()
    for r in range(2):
        forged_round(local, r)
    row = local.value.rows["eve"]
    for forge in (curious, lambda u: chosen(u, row={"eve": 1.0})):
        forged_round(local, 2, {"eve": forge})
        assert local.value.rows["eve"] == row
    forged_round(local, 3)
    row = local.value.rows["eve"]
    forged_round(local, 4, {"eve": curious})
    assert local.value.rows["eve"] == row


@pytest.mark.parametrize("leaver", ["", "ida"])
def test_pairs_are_not_sent_again_to_a_client_whose_upload_never_counts(leaver, make) -> None:
    # Otherwise, the client would receive new pairs in every exchange, or if a client leaves.
    local, seen, names = make(), [], [*NAMES]
    forged_round(local, 0)
    for r in range(1, 5):
        local.open(nth(r), names)
        seen.append(bool(down(local, "eve").peers))
        if leaver in names:
            local.leave(leaver)
            names.remove(leaver)
        forged_round(local, r, present=[name for name in names if name != "eve"])
    assert seen == [True, False, False, False]


def test_with_two_others_no_mean_is_nearly_one_upload(make) -> None:
    local = make(least_others=2)
    for r in range(8):
        _, uploads = forged_round(local, r, {"eve": curious})
        row = local.server.rows(local.value, local.exchange)["eve"]
        others = {name: weight for name, weight in row.items() if name != "eve"}
        assert row == {"eve": 1.0} or max(others.values()) <= sum(others.values()) / 2 + 1e-9
        received = down(local, "eve")["adapter"]
        for name in ("ann", "ben", "ida"):
            assert not equal(received, {n: uploads[name]["adapter"][n] for n in received})


def test_honest_clients_use_the_weights_that_the_server_uses(make) -> None:
    local = make(least_others=2)
    for r in range(3):
        forged_round(local, r)
    for name, client in local.clients.items():
        assert local.server.rows(local.value, local.exchange)[name] == pytest.approx(client.row)
        assert sum(w > 0 for n, w in client.row.items() if n != name) != 1


def test_an_absent_client_cannot_leave_another_alone_in_a_mean(make) -> None:
    local = make(least_others=2)
    for r in range(2):
        forged_round(local, r)
    _, uploads = forged_round(local, 2, present=["ann", "eve"])
    after = down(local, "eve")["adapter"]
    assert equal(after, {n: uploads["eve"]["adapter"][n] for n in after})


def naive(row: dict[str, float], own: str, least: int) -> dict[str, float]:
    """Find by bisection the factor c at which all min(c w, limit) add up to the old sum."""
    others = {name: w for name, w in row.items() if name != own and w > 0}
    total = sum(others.values())
    low, high = 1.0, 1e12
    for _ in range(200):
        middle = math.sqrt(low * high)
        scaled = sum(min(middle * w, total / least) for w in others.values())
        low, high = (middle, high) if scaled < total else (low, middle)
    return {**row, **{name: min(high * w, total / least) for name, w in others.items()}}


WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(1e-6, 1), min_size=1)


@given(WEIGHTS, st.integers(1, 6))
def test_no_other_client_has_more_than_its_share(row, least) -> None:
    others = row.keys() - {"a"}
    limited = with_least_others(row, "a", least)
    if least == 1 or not others:
        assert limited == row
    elif len(others) < least:
        assert limited == {"a": 1.0}
    else:
        assert limited == pytest.approx(naive(row, "a", least), rel=1e-5)
        assert sum(limited.values()) == pytest.approx(sum(row.values()))
        total = sum(limited[name] for name in others)
        assert max(limited[name] for name in others) <= total / least * (1 + 1e-9)


def test_a_trial_keeps_the_two_best_others() -> None:
    # Without the limit, small weights are dropped.
    shares, above = dict.fromkeys("abcd", 0.25), {"a": 1.0, "b": 0.0, "c": 5.9, "d": 6.0}
    assert row_of(shares, above, 2.0, "a").keys() == {"a", "b"}
    row = row_of(shares, above, 2.0, "a", 2)
    assert len(row.keys() - {"a"}) == 2
    assert row["b"] == pytest.approx(sum(w for n, w in row.items() if n != "a") / 2)
    assert sum(row.values()) == pytest.approx(1)

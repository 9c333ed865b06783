"""The parameters from which the bounds measure a client's change, for clients that come and go."""

from typing import Any

import pytest
from auto_runs import started
from bounded import bounded_round
from every_method import some

FAST = {"steps": 2, "batch": 2, "precision": "fp32", "reset_optimiser": True}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "auto": {"name": "auto", "router": {"every": 20}},
    "cobo": {"name": "cobo"},
    "fedfomo": {"name": "fedfomo"},
    "ifca": {"name": "ifca"},
    "fedalt": {"name": "fedalt"},
    "pcl": {"name": "pcl-uniform", "warmup": 1, "every": 1},
    "pcl, released": {"name": "pcl-uniform", "warmup": 1, "every": 1, "form": "released"},
    "fedlease": {"name": "fedlease", "warmup": 1},
}
NAMES = ["ann", "ben", "carl", "dora"]


@pytest.fixture
def run(config):
    """A run of four clients with the same text."""
    texts = dict.fromkeys(NAMES, "poet")
    return lambda name: started(config, texts, method=METHODS[name], rounds=60, training=FAST)


@pytest.mark.parametrize("method", some({"fedalt", "pcl"}, METHODS))
@pytest.mark.parametrize("present", some({"ann"}, ["ann", "ben carl dora"]))
def test_absent_and_present_clients_are_included(method, present, run) -> None:
    local = run(method)
    for round in range(13):
        names = NAMES if round == 0 or round > 10 else present.split()
        assert bounded_round(local, round, names) == {}, round


@pytest.mark.parametrize("method", some({"fedalt"}, ["fedalt", "auto", "fedlease"]))
def test_a_client_that_has_lost_its_state_is_included(method, run) -> None:
    local, fresh = run(method), run(method)
    for round in range(10):
        assert bounded_round(local, round, NAMES) == {}
    local.clients["ann"].restore(fresh.clients["ann"].state())
    for round in range(10, 12):
        assert bounded_round(local, round, NAMES) == {}


@pytest.mark.parametrize("times", some({9}, [9, -9]))
@pytest.mark.parametrize("method", some({"fedalt", "fedlease"}, METHODS))
def test_a_change_beyond_the_bound_is_excluded_in_every_round(method, times, run) -> None:
    local = run(method)
    for round in range(4):
        refused = bounded_round(local, round, NAMES, "dora", times)
        assert [*refused] == ["dora"], round
        assert "times the round's median" in refused["dora"]

"""The parameters from which the bounds measure a client's change, for clients that come and go."""

from typing import Any

import pytest
import torch
from every_method import some
from turns import nth

from coterie.testing.rounds import joined, step

FAST = {"steps": 2, "batch": 2, "precision": "fp32", "reset_optimiser": True}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "auto": {"name": "auto", "router": {"every": 20}},
    "cobo": {"name": "cobo"},
    "fedalt": {"name": "fedalt"},
    "pcl": {"name": "pcl-uniform", "warmup": 1, "every": 1},
    "pcl, released": {"name": "pcl-uniform", "warmup": 1, "every": 1, "form": "released"},
    "fedlease": {"name": "fedlease", "warmup": 1},
}
NAMES = ["ann", "ben", "carl", "dora"]


@pytest.fixture
def run(config):
    """A run of four clients with the same text."""

    def started(method: str) -> Any:
        clients = [{"name": name, "path": "poet.txt"} for name in NAMES]
        return joined(config(clients=clients, method=METHODS[method], rounds=60, training=FAST))

    return started


def counted_round(local: Any, round: int, names: list[str], times: float = 1) -> dict[str, str]:
    """Execute an exchange with the bounds of uploads; return the reasons for exclusions.

    Args:
        local: The run.
        round: The number of the exchange.
        names: The clients that take part.
        times: A factor that multiplies the change of the client dora, measured from the start of
            its training.
    """
    local.open(nth(round), names)
    local.exchange.begin()
    for name in names:
        upload = step(local, name, round)
        if name == "dora" and times != 1:
            for group, starts in local.server.reference(
                local.value, name, upload, local.exchange
            ).items():
                for n, tensor in upload.groups.get(group, {}).items():
                    tensor.copy_(starts[n] + times * (tensor - starts[n]))
        local.take(name, local.schema.send("up", upload))
    local.exchange.settle()
    local.close()
    return dict(local.exchange.refused)


@pytest.mark.parametrize("method", some({"fedalt", "pcl"}, METHODS))
@pytest.mark.parametrize("present", some({"ann"}, ["ann", "ben carl dora"]))
def test_clients_that_were_absent_and_clients_that_were_not_are_included(
    method, present, run
) -> None:
    local = run(method)
    for round in range(13):
        names = NAMES if round == 0 or round > 10 else present.split()
        assert counted_round(local, round, names) == {}, round


@pytest.mark.parametrize("method", some({"fedalt"}, ["fedalt", "auto", "fedlease"]))
def test_a_client_that_has_lost_its_state_is_included(method, run) -> None:
    local, fresh = run(method), run(method)
    for round in range(10):
        assert counted_round(local, round, NAMES) == {}
    local.clients["ann"].restore(fresh.clients["ann"].state())
    for round in range(10, 12):
        assert counted_round(local, round, NAMES) == {}


@pytest.mark.parametrize("times", some({9}, [9, -9]))
@pytest.mark.parametrize("method", some({"fedalt", "fedlease"}, METHODS))
def test_a_change_beyond_the_bound_is_excluded_in_every_round(method, times, run) -> None:
    local = run(method)
    for round in range(4):
        refused = counted_round(local, round, NAMES, times)
        assert [*refused] == ["dora"], round
        assert "times the round's median" in refused["dora"]


def test_references_are_saved(run) -> None:
    local = run("fedalt")
    counted_round(local, 0, NAMES)
    upload = step(local, "ann", 1)
    before = local.server.reference(local.value, "ann", upload, local.exchange)["adapter"]
    local.value = local.value.restored(local.value.state())
    after = local.server.reference(local.value, "ann", upload, local.exchange)["adapter"]
    assert all(torch.equal(before[name], after[name]) for name in upload["adapter"])
    assert not all(torch.equal(before[n], t) for n, t in local.value.adapter.items())
    local.leave("ann")
    assert "ann" not in local.value.uploads

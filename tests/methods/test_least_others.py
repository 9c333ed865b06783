"""The fewest other clients in a mean, for all methods: small means are missing or refused."""

from typing import Any

import pytest
from auto_runs import forged_round
from tensors import equal

from coterie.errors import CoterieError
from coterie.methods.registry import available
from coterie.testing.loop import assert_equal
from coterie.testing.rounds import down, joined

NAMES = ("diarist", "poet", "whaler")
SETTINGS: dict[str, dict[str, Any]] = {"grouped": {"groups": dict.fromkeys(NAMES, "all")}}
SETTINGS["ifca"] = {"clusters": 1}
LIMITED = ["fedavg", "comigs-1g1s", "ditto", "grouped", "fedsa", "fedprompt", "ifca"]
REFUSED = ["hetlora", "flexlora", "fedamole", "cobo", "fedfomo"]
REFUSED += ["pcl-1", "pcl-2", "pcl-3", "pcl-uniform"]


@pytest.fixture
def start(config):
    def started(name: str, least_others: int, **settings: Any) -> Any:
        method = {"name": name, **SETTINGS.get(name, {}), **settings}
        training = {"steps": 1, "batch": 1, "precision": "fp32"}
        aggregation = {"least_others": least_others}
        return joined(config(method=method, rounds=4, training=training, aggregation=aggregation))

    return started


@pytest.mark.parametrize("name", LIMITED)
def test_means_of_all_clients_are_permitted_and_of_two_are_not(name, start) -> None:
    limited, other = start(name, 2), start(name, 1)
    for local in (limited, other):
        forged_round(local, 0)
    assert_equal(limited.value.state(), other.value.state(), "server")
    before = {client: down(limited, client).groups for client in NAMES}
    for local in (limited, other):
        forged_round(local, 1, present=["diarist", "poet"])
    changed = []
    for client in NAMES:
        after, without_limit = down(limited, client).groups, down(other, client).groups
        for group, tensors in after.items():
            assert equal(tensors, before[client][group])
            changed.append(not equal(tensors, without_limit[group]))
    assert any(changed)


def test_a_mean_of_two_others_without_the_own_upload_is_permitted(start) -> None:
    # FedALT sends each client the mean of all other clients.
    limited, other = start("fedalt", 2), start("fedalt", 1)
    for local in (limited, other):
        forged_round(local, 0)
    assert_equal(limited.value.state(), other.value.state(), "server")


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_use_single_uploads_are_refused(name, start) -> None:
    with pytest.raises(CoterieError, match=r"aggregation\.least_others limits means only, but"):
        start(name, 2)


def test_exact_means_are_refused(start) -> None:
    with pytest.raises(CoterieError, match="least_others limits means only"):
        start("fedavg", 2, exact=True)


def test_every_method_is_either_limited_or_refused_or_sends_nothing() -> None:
    # A field that the server receives from each client, and does not average, has no limit.
    refused = set()
    for name, kind in available().items():
        schema = kind().schema()
        single = {f.name for f in schema.up if f.dtype != "json"} - schema.averaged
        refused |= {name} if single else set()
    assert refused >= {*REFUSED, "fedmkt", "fedmkt-fedavg", "pcl-theoretical"}
    assert not refused & {*LIMITED, "auto", "fedalt", "fedlease"}

"""A mean for each client: its weights, its place in downloads, and what survives."""

from typing import Any

import pytest
from tensors import close_to, equal, mean_of

import coterie
from coterie import CoterieError
from coterie.messages import MessageError
from coterie.testing.rounds import down, joined, one_round, take

GROUPS = {"diarist": "prose", "poet": "verse", "whaler": "prose"}


def run_of(config, **changes: Any) -> coterie.RunConfig:
    return config(method={"name": "grouped", "groups": GROUPS}, rounds=2, **changes)


@pytest.mark.parametrize("weights", ["uniform", "tokens"])
def test_each_client_receives_the_mean_of_its_group(weights, config) -> None:
    local: Any = joined(run_of(config, aggregation={"weights": weights}))
    start = down(local, "poet")["adapter"]
    uploads = one_round(local, 0)
    sizes = {c: len(client.context.data.train.ids) for c, client in local.clients.items()}
    for name in GROUPS:
        group = [c for c in GROUPS if GROUPS[c] == GROUPS[name]]
        shares = {c: sizes[c] if weights == "tokens" else 1 for c in group}
        mean = down(local, name)["adapter"]
        assert mean.keys() == start.keys()
        expected = mean_of((uploads[c]["adapter"] for c in group), shares.values())
        assert close_to(mean, expected, atol=1e-7)


def test_a_client_that_is_away_keeps_the_mean_of_its_group(config) -> None:
    local: Any = joined(run_of(config))
    one_round(local, 0)
    before = {name: down(local, name)["adapter"] for name in GROUPS}
    uploads = one_round(local, 1, ["diarist", "whaler"])
    poet = down(local, "poet")["adapter"]
    assert equal(poet, before["poet"])
    local.leave("diarist")
    whaler = down(local, "whaler")["adapter"]
    assert close_to(whaler, mean_of(u["adapter"] for u in uploads.values()), atol=1e-7)
    assert "diarist" not in local.value.means


def test_every_client_needs_a_group(config) -> None:
    run = config(method={"name": "grouped", "groups": {"poet": "verse"}})
    with pytest.raises(CoterieError, match=r"add diarist, whaler to its setting `groups`"):
        joined(run)


def test_a_client_with_fewer_sets_receives_only_what_it_holds(config) -> None:
    method = {"name": "grouped", "groups": GROUPS, "mlp": {"sets": {"whaler": 1, "others": 2}}}
    local: Any = joined(config(method=method, rounds=2))
    uploads = one_round(local, 0)
    take(local)
    whaler, diarist = down(local, "whaler")["adapter"], down(local, "diarist")["adapter"]
    assert whaler.keys() == uploads["whaler"]["adapter"].keys() < diarist.keys()
    mean = mean_of(u["adapter"] for c, u in uploads.items() if c != "poet")
    assert close_to(diarist, mean, atol=1e-7)
    assert equal(whaler, {name: diarist[name] for name in whaler})


@pytest.mark.parametrize("method", ["auto", "grouped"])
@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_a_reduction_that_no_mean_would_use_is_refused(method, name, config) -> None:
    settings = {"name": method} | ({"groups": GROUPS} if method == "grouped" else {})
    run = config(method=settings, aggregation={"transforms": [name]})
    with pytest.raises(CoterieError, match=f"{name!r} has no effect with the method {method!r}"):
        joined(run)


def test_a_client_without_a_group_may_not_join(config) -> None:
    # A deployment may admit clients that the run file does not name.
    local: Any = joined(run_of(config))
    with pytest.raises(MessageError, match="no group of the client 'stranger'"):
        local.join("stranger", local.clients["poet"].hello())
    assert "stranger" not in local.value.held

"""Variants of `auto`: their weights are as far from the shares as its own."""

import math
from typing import Any

import pytest

from coterie.config.plugins import load_plugin
from coterie.testing.rounds import joined, one_round
from coterie.testing.small import small_run
from reproduce import ablations
from reproduce.ablations import divergence, tilted

SHARES = {"a": 0.5, "b": 0.25, "c": 0.25}
SETTINGS: dict[str, Any] = {"router": {"every": 2, "steps": 1}, "samples": 8, "trust": 300.0}
FAST = {"steps": 2, "batch": 2, "precision": "fp32", "learning_rate": 0.01}


@pytest.fixture(autouse=True)
def _variants() -> None:
    """The variants are methods of a plugin."""
    load_plugin(ablations.__file__)


def rows(tmp_path, name: str, rounds: int = 2, seed: int = 0) -> dict[str, dict[str, float]]:
    """Return the weights of all clients after some rounds of a variant, the last with a trial."""
    run = small_run(tmp_path, method={"name": name, **SETTINGS}, rounds=6, training=FAST, seed=seed)
    local: Any = joined(run)
    for number in range(rounds):
        one_round(local, number)
    return {name: dict(client.row) for name, client in local.clients.items()}


@pytest.mark.parametrize("distance", [0.0, 0.05, 0.3])
def test_tilted_weights_have_a_divergence(distance) -> None:
    row = tilted(SHARES, {"a": 0.1, "b": 0.9, "c": -0.5}, distance)
    assert divergence(row, SHARES) == pytest.approx(distance, abs=1e-9)
    factors = {c: math.log(row[c] / share) for c, share in SHARES.items()}
    assert factors["b"] - factors["a"] == pytest.approx(0.8 / 0.6 * (factors["a"] - factors["c"]))


def test_weights_by_cosine_are_as_far_from_the_shares(tmp_path) -> None:
    shares: dict[str, float] = dict.fromkeys(("diarist", "poet", "whaler"), 1 / 3)
    own, cosine = (rows(tmp_path / n, n) for n in ("auto", "auto-cosine"))
    assert max(divergence(row, shares) for row in own.values()) > 0.01
    for name, row in own.items():
        assert divergence(cosine[name], shares) == pytest.approx(divergence(row, shares), abs=1e-6)
        assert cosine[name][name] == max(cosine[name].values())


def test_permuted_weights_are_those_of_others(tmp_path) -> None:
    differ = 0
    for seed in range(3):
        own, permuted = (
            rows(tmp_path / f"{n}-{seed}", n, seed=seed) for n in ("auto", "auto-permuted")
        )
        for name, row in own.items():
            assert permuted[name].get(name) == row.get(name)
            assert sorted(permuted[name].values()) == sorted(row.values())
            differ += permuted[name] != row
    assert differ


def test_there_is_one_trial(tmp_path) -> None:
    assert rows(tmp_path / "2", "auto-once") == rows(tmp_path / "4", "auto-once", rounds=4)
    assert rows(tmp_path / "auto", "auto") != rows(tmp_path / "5", "auto", rounds=4)


def test_the_first_expert_is_judged_too(tmp_path) -> None:
    run = small_run(tmp_path, method={"name": "auto-experts", **SETTINGS})
    names = joined(run).clients["poet"].judged  # pyright: ignore[reportAttributeAccessIssue]
    of_auto = joined(small_run(tmp_path / "auto", method={"name": "auto", **SETTINGS}))
    others = names.keys() - of_auto.clients["poet"].judged  # pyright: ignore
    assert others
    parameters = joined(run).clients["poet"].parameters()
    assert {parameters[name].expert for name in others} == {0}

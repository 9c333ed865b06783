"""Assignments against whole-number programmes and brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds as Box
from scipy.optimize import LinearConstraint, OptimizeResult, milp

from coterie.errors import CoterieError
from coterie.methods.fedamole import assignment
from coterie.methods.fedamole.assignment import Bounds, assign, assign_all, relevance

SMALL = st.integers(1, 12)
BOUNDS = st.builds(Bounds, st.integers(1, 12), st.integers(0, 12), st.integers(0, 12))


def programme(scores: np.ndarray, bounds: Bounds) -> np.ndarray | None:
    """Compute the best assignment by integer programming; return None if there is none."""
    E, C = scores.shape
    rows = np.array([[i == e for i in range(E) for _ in range(C)] for e in range(E)], float)
    columns = np.array([[j == c for _ in range(E) for j in range(C)] for c in range(C)], float)
    constraints = [
        LinearConstraint(rows, bounds.clients_per_expert, bounds.clients_per_expert),
        LinearConstraint(columns, bounds.least, bounds.most),
    ]
    whole = {"integrality": np.ones(E * C), "options": {"mip_rel_gap": 0}}
    result = milp(-scores.ravel(), constraints=constraints, bounds=Box(0, 1), **whole)
    return None if result.x is None else result.x.reshape(E, C).round().astype(bool)


def check(chosen: np.ndarray, bounds: Bounds) -> None:
    held = chosen.sum(axis=0)
    assert chosen.dtype == bool
    assert (chosen.sum(axis=1) == bounds.clients_per_expert).all()
    assert bounds.least <= held.min()
    assert held.max() <= bounds.most


def possible(bounds: Bounds, experts: int, clients: int) -> bool:
    try:
        bounds.refuse(experts, clients)
    except CoterieError:
        return False
    return True


def test_the_assignment_is_that_of_a_whole_number_programme() -> None:
    chance = np.random.default_rng(0)
    for _ in range(150):
        E, C = chance.integers(1, 9, 2)
        bounds = Bounds(*(int(n) for n in chance.integers([1, 0, 1], 7))).relaxed(int(E), int(C))
        scores, ties = chance.normal(size=(E, C)), chance.random() < 0.3
        scores = scores.round() if ties else scores
        chosen, best = assign(scores, bounds), programme(scores, bounds)
        check(chosen, bounds)
        assert best is not None
        assert scores[chosen].sum() == pytest.approx(scores[best].sum(), abs=1e-9)
        assert ties or np.array_equal(chosen, best)


@settings(max_examples=60)
@given(SMALL, SMALL, BOUNDS)
def test_bounds_are_refused_exactly_when_nothing_meets_them(E, C, bounds) -> None:
    assert possible(bounds, E, C) == (programme(np.zeros((E, C)), bounds) is not None)


@settings(max_examples=200)
@given(st.integers(1, 500), st.integers(1, 500), BOUNDS)
def test_relaxed_bounds_can_be_met_and_change_no_more_than_they_must(E, C, bounds) -> None:
    relaxed = bounds.relaxed(E, C)
    relaxed.refuse(E, C)
    if possible(bounds, E, C):
        assert relaxed == bounds
    assert relaxed.clients_per_expert == min(bounds.clients_per_expert, C)
    if relaxed.most != bounds.most:
        assert relaxed.most > bounds.most
        assert not possible(Bounds(relaxed.clients_per_expert, 0, relaxed.most - 1), E, C)
    if relaxed.least != bounds.least:
        assert relaxed.least < bounds.least
        assert not possible(Bounds(relaxed.clients_per_expert, relaxed.least + 1, E), E, C)


@pytest.mark.parametrize(("E", "C"), [(30, 10), (7, 3), (3, 7)])
def test_homogeneous_bounds_share_experts_out_evenly(E, C) -> None:
    bounds = Bounds(2, 0, 8).homogeneous(E, C)
    held = assign(np.random.default_rng(2).normal(size=(E, C)), bounds).sum(axis=0)
    assert held.sum() == 2 * E
    assert held.max() - held.min() == (2 * E % C > 0)


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        (
            Bounds(5, 1, 8),
            "Each expert needs 5 clients, but the run has only 4; lower "
            "clients_per_expert (k_c) to at most 4.",
        ),
        (
            Bounds(2, 4, 8),
            "There are too few experts: 4 clients need 16 assignments, at least 4 for each client, "
            "but 7 experts provide only 14, 2 for each expert. Lower min_experts to at most 3, or "
            "raise clients_per_expert or experts.",
        ),
        (
            Bounds(2, 1, 3),
            "There are too many experts: 7 experts need 14 assignments, 2 for each expert, but 4 "
            "clients provide only 12, at most 3 for each client. Raise max_experts to at least 4, "
            "or lower clients_per_expert or experts.",
        ),
    ],
)
def test_a_refusal_says_what_fails_and_what_helps(bounds, sentence) -> None:
    with pytest.raises(CoterieError) as refusal:
        assign(np.zeros((7, 4)), bounds)
    assert str(refusal.value) == sentence


def test_the_order_of_experts_and_clients_does_not_matter() -> None:
    chance = np.random.default_rng(3)
    scores, bounds = chance.normal(size=(12, 9)), Bounds(2, 1, 4)
    chosen = assign(scores, bounds)
    for _ in range(5):
        order = np.ix_(chance.permutation(12), chance.permutation(9))
        assert np.array_equal(assign(scores[order], bounds), chosen[order])


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_scale_of_scores_does_not_matter(scale) -> None:
    scores, bounds = np.random.default_rng(4).normal(size=(20, 8)), Bounds(2, 1, 7)
    moved = scale * (scores + np.arange(20)[:, None])
    assert np.array_equal(assign(moved, bounds), assign(scores, bounds))


def test_modules_side_by_side_are_solved_as_alone(monkeypatch) -> None:
    chance, bounds = np.random.default_rng(5), Bounds(2, 1, 5)
    scores = {f"layer.{i}": chance.normal(size=(10, 6)).round(i % 3) for i in range(24)}
    scores["ties"] = np.ones((10, 6))
    alone = {name: assign(module, bounds) for name, module in scores.items()}
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        together = assign_all(scores, bounds)
        assert list(together) == list(scores)
        assert all(np.array_equal(together[name], alone[name]) for name in scores)
    assert assign_all({}, bounds) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        OptimizeResult(status=0, x=np.full(6, 0.5)),
        OptimizeResult(status=0, x=np.array([1.0, 0, 1, 0, 0, 2])),
        OptimizeResult(status=4, x=None, message="numbers"),
    ],
)
def test_a_solution_that_is_no_assignment_is_an_error(monkeypatch, wrong) -> None:
    monkeypatch.setattr(assignment, "linprog", lambda *_, **__: wrong)
    with pytest.raises(RuntimeError, match="assignment"):
        assign(np.zeros((2, 2)), Bounds(1, 1, 1))


def test_relevance_is_the_softmax_over_clients() -> None:
    chance = np.random.default_rng(6)
    experts, tokens = chance.normal(size=(5, 4)), chance.normal(size=(3, 4))
    shares = relevance(experts.astype(np.float32), tokens.astype(np.float32), dim=9)
    assert shares.dtype == np.float64
    for j in range(5):
        row = [np.exp(sum(experts[j] * tokens[c]) / 3) for c in range(3)]
        assert shares[j] == pytest.approx(np.array(row) / sum(row), rel=1e-5)
    assert np.isfinite(relevance(1e4 * experts, tokens, dim=9)).all()

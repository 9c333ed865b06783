"""Trust rows and what they are made of, against naive versions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.methods.pcl.trust import cosine, sparse_distance, trust_row


def test_a_row_is_the_softmax_of_the_scores() -> None:
    row = trust_row("a", {"a": -1.0, "b": -2.0, "c": -0.5})
    total = math.exp(-1) + math.exp(-2) + math.exp(-0.5)
    assert row == pytest.approx(
        {"a": math.exp(-1) / total, "b": math.exp(-2) / total, "c": math.exp(-0.5) / total}
    )


def test_top_and_threshold_leave_the_best() -> None:
    scores = {"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.1}
    assert trust_row("a", scores, top=1) == {"a": 1, "b": 0, "c": 0, "d": 0}
    kept = trust_row("a", scores, threshold=0.5)
    assert kept["d"] == 0
    assert kept["c"] > 0
    # The two best are left even if no score is above the threshold.
    strict = trust_row("a", scores, threshold=5)
    assert [name for name, weight in strict.items() if weight] == ["a", "b"]


def test_a_score_that_is_not_finite_counts_nothing() -> None:
    assert trust_row("a", {"a": 0.0, "b": math.nan, "c": -math.inf}) == {"a": 1, "b": 0, "c": 0}


def test_without_a_finite_score_a_client_trusts_itself_and_says_so(caplog) -> None:
    assert trust_row("b", {"a": math.nan, "b": math.nan}) == {"a": 0, "b": 1}
    assert "keeps its own model" in caplog.text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6))
def test_weights_sum_to_one(scores) -> None:
    row = trust_row("0", {str(i): score for i, score in enumerate(scores)})
    assert sum(row.values()) == pytest.approx(1)


def test_cosines() -> None:
    chance = torch.Generator().manual_seed(0)
    a, b = ({n: torch.randn(3, 4, generator=chance) for n in ("x", "y")} for _ in range(2))
    u, v = (torch.cat([t["x"].reshape(-1), t["y"].reshape(-1)]) for t in (a, b))
    assert cosine(a, b) == pytest.approx((u @ v / u.norm() / v.norm()).item(), rel=1e-5)
    columns = [
        (a[n][:, i] @ b[n][:, i] / a[n][:, i].norm() / b[n][:, i].norm()).item()
        for n in ("x", "y")
        for i in range(4)
    ]
    assert cosine(a, b, by_columns=True) == pytest.approx(sum(columns) / 8, rel=1e-5)


def test_the_distance_of_sparse_logits_is_that_of_dense_ones() -> None:
    chance = torch.Generator().manual_seed(1)
    dense, sparse = [], []
    for _ in range(2):
        logits = torch.randn(20, 30, generator=chance) * 5
        places = logits.topk(7).indices.sort().values
        sparse.append((logits.gather(-1, places), places))
        dense.append(torch.zeros_like(logits).scatter(-1, places, logits.gather(-1, places)))
    expected = (dense[0] - dense[1]).abs().sum(-1).mean().item()
    assert sparse_distance(sparse[0], sparse[1]) == pytest.approx(expected, rel=1e-5)
    assert sparse_distance(sparse[0], sparse[0]) == 0

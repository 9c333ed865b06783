"""Weights from slopes, compared with the equations of `methods/auto/method.py` in plain Python."""

import math

import pytest
import torch
from auto_runs import naive_row

from coterie.methods.auto.choice import row_from_slopes, shares_of, standard_error, with_no_change

EQUAL = dict.fromkeys("abcd", 0.25)


def slopes_of(means: list[float], errors: list[float]) -> torch.Tensor:
    """Return slopes for two samples with given means and standard errors for each client.

    If the shares are equal, and the means and the errors both sum to 0, then each sample's mean
    slope is 0. A negative error reverses which sample has the larger slope.
    """
    rows = [[m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("slope", "error", "evidence"),
    [
        pytest.param(0.009, 0.0001, 0, id="inside the margin, many standard errors"),
        pytest.param(0.012, 0.001, 2, id="outside the margin, many standard errors"),
        pytest.param(0.0105, 0.001, 0.5, id="just outside the margin"),
        pytest.param(0.03, 0.04, 0, id="outside the margin, within a standard error"),
        pytest.param(0.05, 0.02, 1.5, id="outside the margin, some standard errors"),
        pytest.param(0.005, 0.008, 0, id="inside the margin, within a standard error"),
        pytest.param(0.2, 0.02, 3, id="the limit"),
        pytest.param(0.005, 0.0, 0, id="equal samples, inside the margin"),
        pytest.param(0.02, 0.0, 3, id="equal samples, outside the margin"),
        pytest.param(0.0, 0.0, 0, id="no slope"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_slopes_count_outside_the_margin_and_the_standard_error(
    slope: float, error: float, evidence: float, sign: int
) -> None:
    # The slopes of `a` and `b` are opposite, and those of `c` and `d` are 0.
    slopes = slopes_of([sign * slope, -sign * slope, 0, 0], [error, -error, 0, 0])
    row = row_from_slopes(EQUAL, slopes, 0.5, "d")
    weights = [math.exp(-0.5 * sign * evidence), math.exp(0.5 * sign * evidence), 1, 1]
    expected = dict(zip("abcd", (w / sum(weights) for w in weights), strict=True))
    assert row == pytest.approx(expected, rel=1e-6)


def test_evidence_is_relative_and_no_change_has_a_weight() -> None:
    # All clients help: `a` and `b` clearly more than the mean, and `c` slightly less.
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    prior = [0.5 / (4 / 3), 0.3 / (4 / 3), 0.2 / (4 / 3), 0.25]
    assert with_no_change(shares).tolist() == pytest.approx(prior)
    slopes = slopes_of([-0.06, -0.08, -0.02], [0.01, 0.02, -0.015])
    expected, _, _ = naive_row(shares, slopes.tolist(), 0.7, "a")
    assert row_from_slopes(shares, slopes, 0.7, "a") == pytest.approx(expected, rel=1e-9)


def test_a_single_sample_is_no_evidence() -> None:
    shares, slopes = {"a": 0.6, "b": 0.39, "c": 0.01}, torch.tensor([[1.0, -1.0, 0.5]]).double()
    row = row_from_slopes(shares, slopes, 1.0, "a")
    assert row == pytest.approx({"a": 0.6 / 0.99, "b": 0.39 / 0.99})  # small weights are left out


def test_small_weights_are_left_out() -> None:
    slopes = slopes_of([1, -1, 0, 0], [0.1, -0.1, 0, 0])
    row = row_from_slopes(EQUAL, slopes, 1.0, "d")  # e = 3, -3, 0, 0
    total = math.exp(3) + 2
    assert row == pytest.approx({"b": math.exp(3) / total, "c": 1 / total, "d": 1 / total})


@pytest.mark.parametrize(("own", "alone"), [("b", False), ("a", True)])
def test_a_client_that_nobody_helps_has_the_shares(own: str, alone: bool) -> None:
    slopes = slopes_of([-0.5, 0.5], [0.01, -0.01])
    row = row_from_slopes({"a": 0.5, "b": 0.5}, slopes, 2.0, own)
    assert row == ({"a": 0.5, "b": 0.5} if alone else {"a": 1.0})


def test_a_standard_error_is_that_of_the_mean() -> None:
    samples = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0], [7.0, 2.0]])
    deviation = math.sqrt((9 + 1 + 1 + 9) / 3)
    assert standard_error(samples).tolist() == pytest.approx([deviation / 2, 0])
    assert standard_error(samples[:1]).tolist() == [math.inf, math.inf]


def test_a_share_is_limited_by_the_median() -> None:
    tokens = {"a": 100, "b": 50, "c": 1000}
    assert shares_of(tokens) == pytest.approx({"a": 100 / 450, "b": 50 / 450, "c": 300 / 450})

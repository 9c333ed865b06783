"""Weights from slopes, compared with the equations of `methods/auto/method.py` in plain Python."""

import math
from statistics import fmean

import pytest
import torch
from auto_runs import naive_evidence, naive_row
from tensors import close_to, equal

from coterie.methods.auto.choice import (
    at_one_length,
    excess,
    latest_trial,
    mixed,
    part_of,
    row_of,
    shares_of,
    standard_error,
    updated,
)

EQUAL = dict.fromkeys("abcd", 0.25)


def slopes_of(means: list[float], errors: list[float]) -> torch.Tensor:
    """Return slopes for two samples with given means and standard errors for each client.

    If the shares are equal, and the means and the errors both sum to 0, then each sample's mean
    slope is 0. A negative error reverses which sample has the larger slope.
    """
    rows = [[m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1)]
    return torch.tensor(rows, dtype=torch.float64)


def test_evidence_is_relative_to_the_mean_slope() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    slopes = [[-0.06, -0.08, -0.02], [-0.04, -0.12, -0.05], [-0.05, -0.11, 0.01]]
    after = updated({}, torch.tensor(slopes, dtype=torch.float64), shares)
    expected = naive_evidence(slopes, shares, {})
    assert after == {c: pytest.approx(e, rel=1e-9) for c, e in expected.items()}


def test_earlier_evidence_has_half_of_its_precision() -> None:
    first = updated({}, slopes_of([0.3, -0.1, -0.2, 0], [0.1, -0.1, 0.2, -0.2]), EQUAL)
    assert first["a"] == pytest.approx((0.3, 100))
    second = updated(first, slopes_of([0.1, -0.1, 0.1, -0.1], [0.2, -0.2, 0.1, -0.1]), EQUAL)
    assert second["a"] == pytest.approx(((50 * 0.3 + 25 * 0.1) / 75, 75))
    third = updated(second, slopes_of([0.1, -0.1], [0.2, -0.2]), {"c": 0.5, "d": 0.5})
    assert third["a"] == second["a"]  # not in this trial


def test_slopes_are_shrunk_by_their_errors() -> None:
    evidence = {"a": (0.2, 400.0), "b": (-0.15, 100.0), "c": (-0.15, 1e4), "d": (-0.14, 1e6)}
    variance = fmean([0.04 - 1 / 400, 0.0225 - 1 / 100, 0.0225 - 1e-4, 0.0196 - 1e-6])
    shrunk = {c: m * variance / (variance + 1 / p) for c, (m, p) in evidence.items()}
    assert shrunk["c"] < shrunk["d"] < shrunk["b"]
    expected = {c: max(0.0, s - shrunk["c"] - 0.01) for c, s in shrunk.items()}
    assert excess(evidence) == pytest.approx(expected)
    assert expected["d"] == 0 < expected["b"] < expected["a"]


@pytest.mark.parametrize("count", [2, 50])
def test_slopes_within_their_errors_have_no_effect(count: int) -> None:
    chance = torch.Generator().manual_seed(count)
    slopes = 0.03 * torch.randn(16, count, generator=chance, dtype=torch.float64)
    shares = {str(number): 1 / count for number in range(count)}
    row = row_of(shares, excess(updated({}, slopes, shares)), 100.0, "0")
    assert row == pytest.approx(shares)


def test_more_samples_do_not_make_a_small_difference_a_large_one() -> None:
    # Half of the clients are 0.02 nats worse. The factor tends to exp(-eta (0.02 - margin)).
    weights = []
    for precision in (9e3, 1e5, 1e12):
        evidence = {"a": (-0.01, precision), "b": (0.01, precision)}
        weights.append(row_of({"a": 0.5, "b": 0.5}, excess(evidence), 100.0, "a"))
    assert weights[0] == {"a": 0.5, "b": 0.5}
    assert weights[1]["b"] > 0.27
    assert weights[2]["b"] / weights[2]["a"] == pytest.approx(math.exp(-1), rel=1e-3)


def test_a_single_sample_is_no_evidence() -> None:
    assert updated({}, torch.tensor([[1.0, -1.0]]).double(), {"a": 0.5, "b": 0.5}) == {}
    assert excess({}) == {}
    assert row_of({"a": 0.7, "b": 0.3}, {}, 50.0, "a") == pytest.approx({"a": 0.7, "b": 0.3})


def test_equal_samples_are_evidence() -> None:
    after = updated({}, slopes_of([0.1, -0.1], [0, 0]), {"a": 0.5, "b": 0.5})
    assert excess(after) == pytest.approx({"a": 0.19, "b": 0.0})


def test_weights_follow_the_equation_and_clients_without_evidence_have_the_mean() -> None:
    shares = {"a": 0.4, "b": 0.3, "c": 0.3}
    row = row_of(shares, {"a": 0.06, "b": 0.0}, 20.0, "a")
    assert row == pytest.approx(naive_row(shares, {"a": 0.06, "b": 0.0}, 20.0, "a"), rel=1e-9)
    assert row["c"] / row["b"] == pytest.approx(math.exp(-20 * 0.03))


@pytest.mark.parametrize("count", [4, 40])
def test_weights_below_a_tenth_of_the_equal_share_are_left_out(count: int) -> None:
    shares = {str(number): 1 / count for number in range(count)}
    effect = {str(number): 0.03 * number for number in range(count)}
    row = row_of(shares, effect, 50.0, "1")
    weights = {n: math.exp(-50 * e) for n, e in effect.items()}
    kept = {n for n, w in weights.items() if w >= 0.1 / count * sum(weights.values())}
    assert {*row} == kept
    assert len(kept) < count
    assert sum(row.values()) == pytest.approx(1)


def test_a_standard_error_is_that_of_the_mean() -> None:
    samples = torch.tensor([[1.0, 2.0], [3.0, 2.0], [5.0, 2.0], [7.0, 2.0]])
    deviation = math.sqrt((9 + 1 + 1 + 9) / 3)
    assert standard_error(samples).tolist() == pytest.approx([deviation / 2, 0])
    assert standard_error(samples[:1]).tolist() == [math.inf, math.inf]


def test_a_share_is_limited_by_the_median() -> None:
    tokens = {"a": 100, "b": 50, "c": 1000}
    assert shares_of(tokens) == pytest.approx({"a": 100 / 450, "b": 50 / 450, "c": 300 / 450})


def tensors(seed: int, *names: str) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(3, 2, generator=chance) for name in names}


def test_a_mean_with_other_weights_is_exact_if_the_ratios_are_kept() -> None:
    everybody = {client: tensors(seed, "x", "y") for seed, client in enumerate("abc")}

    def mean(row: dict[str, float]) -> dict[str, torch.Tensor]:
        return {n: sum(w * everybody[c][n] for c, w in row.items()) for n in "xy"}  # pyright: ignore

    received, row = {"a": 0.2, "b": 0.6, "c": 0.2}, {"a": 0.6, "b": 0.3, "c": 0.1}
    pairs = {client: {"x": everybody[client]["x"]} for client in "abc"}
    result = mixed("a", everybody["a"], mean(received), pairs, row, received)
    assert close_to(result, mean(row))
    other = mixed("a", everybody["a"], mean(received), pairs, {"a": 0.5, "c": 0.5}, received)
    assert close_to({"x": other["x"]}, {"x": mean({"a": 0.5, "c": 0.5})["x"]})
    assert equal(
        mixed("a", everybody["a"], mean(received), pairs, {"a": 1.0}, received), everybody["a"]
    )


def test_parameters_are_not_moved_beyond_the_received_mean() -> None:
    own, mean = tensors(0, "x", "y"), tensors(1, "x", "y")
    pairs = {"a": {"x": own["x"]}, "b": {"x": tensors(2, "x")["x"]}}
    result = mixed("a", own, mean, pairs, {"a": 0.5, "b": 0.5}, {"a": 0.9, "b": 0.1})
    assert close_to({"y": result["y"]}, {"y": mean["y"]})


def test_a_mean_with_weights_of_unknown_clients_alone_is_the_received_one() -> None:
    own, mean = tensors(0, "x"), tensors(1, "x")
    assert equal(mixed("a", own, mean, {"a": own}, {"d": 1.0}, {"a": 0.5, "d": 0.5}), mean)


def test_a_part_of_the_weights_sums_to_one() -> None:
    assert part_of({"a": 0.2, "b": 0.3, "c": 0.5}, "ab") == pytest.approx({"a": 0.4, "b": 0.6})
    assert part_of({"a": 0.0, "b": 1.0}, "a") == {}


def test_directions_have_the_length_of_the_median() -> None:
    changes = [
        tensors(0, "x", "y"),
        tensors(1, "x", "y"),
        {n: 0 * t for n, t in tensors(2, "x", "y").items()},
    ]
    changes.append({n: -100 * t for n, t in changes[0].items()})
    norms = [math.sqrt(sum(float(t.square().sum()) for t in c.values())) for c in changes]
    scaled = at_one_length(changes)
    median = sorted(norms)[1]
    for change, norm, result in zip(changes, norms, scaled, strict=True):
        assert close_to(result, {n: t * (median / norm if norm else 0) for n, t in change.items()})
    assert close_to(scaled[3], {n: -t for n, t in scaled[0].items()})


def test_trials_follow_rounds_1_3_7_15() -> None:
    for complete in range(140):
        due = [t for t in (1, 3, 7, 15, 31, 63, 127) if t <= complete]
        assert latest_trial(complete) == max(due, default=0)

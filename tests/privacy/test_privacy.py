"""The Gaussian mechanism against integrals and draws of its privacy loss."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from coterie.privacy.mechanisms import epsilon, noise_for, private_mean
from coterie.privacy.stream import Stream

NONE = 1e-9
"""A noise multiplier so small that the noise is not noticed."""


def stream(key: int = 0) -> Stream:
    return Stream(key.to_bytes(32, "big"))


def integral(eps: float, mu: float) -> float:
    """Return delta of N(mu, 1) against N(0, 1): the integral of max(p - e^eps q, 0)."""
    start = eps / mu + mu / 2  # where p = e^eps q
    return quad(
        lambda x: norm.pdf(x, mu) - math.exp(eps) * norm.pdf(x), start, max(start, mu) + 12,
        epsabs=0, epsrel=1e-9, limit=200,
    )[0]  # fmt: skip


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("releases", [1, 10])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_epsilon_is_that_of_the_integral(noise, releases, delta) -> None:
    mu = math.sqrt(releases) / noise
    eps = epsilon(noise, releases, delta)
    assert eps > 0
    assert integral(eps, mu) == pytest.approx(delta, rel=1e-6)


def test_releases_compose_as_their_privacy_losses_add_up() -> None:
    noise, releases, delta = 4.0, 7, 0.02
    eps = epsilon(noise, releases, delta)
    draws = np.random.default_rng(0).normal(1 / noise, 1, size=(400_000, releases))
    losses = (draws / noise - 1 / (2 * noise**2)).sum(axis=1)  # log p / q of each, added
    estimate = np.maximum(0, 1 - np.exp(eps - losses))
    assert estimate.mean() == pytest.approx(delta, abs=5 * estimate.std() / math.sqrt(400_000))


def test_where_the_noise_alone_is_enough_epsilon_is_zero() -> None:
    mu = 1e-3
    least = math.erf(mu / math.sqrt(8))  # the total variation distance, 2 Phi(mu / 2) - 1
    assert epsilon(1 / mu, 1, least * 1.001) == 0
    assert 0 < epsilon(1 / mu, 1, least * 0.999) < 1e-5


@pytest.mark.parametrize("mu", [30.0, 1e3, 1e6])
def test_little_noise_is_counted_without_overflow(mu) -> None:
    # The second term vanishes beside the first: delta = Phi(-eps / mu + mu / 2), nearly.
    assert epsilon(1 / mu, 1, 1e-5) == pytest.approx(mu**2 / 2 - mu * norm.ppf(1e-5), rel=2e-3)
    assert epsilon(1 / mu, 1, 1e-5) < mu**2 / 2 - mu * norm.ppf(1e-5)


def test_epsilon_falls_with_noise_and_delta_and_grows_with_releases() -> None:
    by_noise = [epsilon(noise, 5, 1e-5) for noise in np.geomspace(0.01, 1000, 40).tolist()]
    by_releases = [epsilon(2.0, releases, 1e-5) for releases in range(1, 300, 10)]
    by_delta = [epsilon(2.0, 5, delta) for delta in np.geomspace(1e-12, 0.5, 20).tolist()]
    assert by_noise == sorted(by_noise, reverse=True)
    assert by_releases == sorted(set(by_releases))
    assert by_delta == sorted(set(by_delta), reverse=True)


@settings(max_examples=100)
@given(st.floats(1e-3, 1e4), st.integers(1, 10_000), st.floats(1e-12, 0.5))
def test_noise_for_undoes_epsilon(eps, releases, delta) -> None:
    noise = noise_for(eps, releases, delta)
    assert epsilon(noise, releases, delta) == pytest.approx(eps, rel=1e-6)
    assert noise_for(eps, 4 * releases, delta) == pytest.approx(2 * noise)


def test_each_vector_is_clipped_before_the_mean() -> None:
    samples = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-30.0, 0.0]])
    # Norms 5, 0.5, 0 and 30 against 1: only the first and the last shrink.
    expected = torch.tensor([(0.6 + 0.3 - 1.0) / 4, (0.8 + 0.4) / 4])
    assert torch.allclose(private_mean(samples, 1.0, NONE, stream()), expected)


def test_the_noise_has_its_standard_deviation_in_every_direction() -> None:
    n, dim, clip, noise = 5, 40_000, 0.7, 3.0
    samples = torch.randn(n, dim, generator=torch.Generator().manual_seed(1))
    exact = private_mean(samples, clip, NONE, stream())
    noisy, again = (private_mean(samples, clip, noise, stream(2)) for _ in range(2))
    drawn = (noisy - exact) / (noise * 2 * clip / n)
    assert drawn.mean().item() == pytest.approx(0, abs=5 / math.sqrt(dim))
    assert drawn.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * dim))
    assert torch.equal(noisy, again)


def test_one_record_moves_the_mean_by_its_share_at_most() -> None:
    n, clip = 6, 0.5
    samples = torch.randn(n, 3, generator=torch.Generator().manual_seed(3))
    # The worst neighbour: a long vector turned round.
    samples[0] = torch.tensor([100.0, 0, 0])
    other = samples.clone()
    other[0] = -samples[0]
    moved = private_mean(samples, clip, NONE, stream()) - private_mean(other, clip, NONE, stream())
    assert moved.norm().item() == pytest.approx(2 * clip / n, rel=1e-5)
    for value in (math.nan, math.inf, 1e38, 0.0):
        other[0] = value
        means = [private_mean(vectors, clip, NONE, stream()) for vectors in (samples, other)]
        moved = means[0] - means[1]
        assert moved.norm().item() <= 2 * clip / n * (1 + 1e-5)

"""The Gaussian mechanism for means over a client's records.

The noise that FedAMoLE (arXiv 2411.19128) adds to embeddings is not calibrated to the sensitivity
and therefore guarantees nothing; this mechanism replaces that noise. Two sets of records are
neighbours if one record is replaced by another; the number n of records is public. The guarantee
covers only the result of `private_mean`, and no other function of these records, such as trained
weights.
"""

import math

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor

from coterie.privacy.stream import Stream, rounded

MOST_EPSILON = 1e9
"""Largest epsilon that can be computed; even far smaller values give no protection."""


def private_mean(samples: Tensor, clip: float, noise: float, stream: Stream) -> Tensor:
    """Clip vectors, and return their mean with Gaussian noise added.

    Each vector is scaled to an L2 norm of at most `clip`, so replacing one record changes the mean
    by at most `2 clip / n`. Values that are not finite are replaced by 0, so that one record cannot
    make the mean NaN.

    Args:
        samples: A tensor of shape (n, dim) with one vector per record, where n >= 1.
        clip: Maximum L2 norm.
        noise: Noise multiplier sigma, greater than 0. The standard deviation of the noise is
            `noise * 2 clip / n`.
        stream: Source of the noise. The receiver must not know its key.

    Returns:
        A float32 tensor of shape (dim,).
    """
    vectors = samples.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0)
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    clipped = vectors * (clip / norms.clamp(min=clip))
    deviation = noise * 2 * clip
    total = rounded(clipped, deviation).sum(dim=0)
    return (stream.with_noise(total, deviation) / len(vectors)).float()


def only_noise(samples: Tensor, clip: float, noise: float, stream: Stream) -> Tensor:
    """Return the result of `private_mean` for vectors whose values are all 0.

    The result therefore consists of noise only, and reveals nothing about the samples.

    Args:
        samples: A tensor of shape (n, dim). Only its shape is used.
        clip: As for `private_mean`.
        noise: As for `private_mean`.
        stream: As for `private_mean`.
    """
    return private_mean(torch.zeros_like(samples), clip, noise, stream)


def epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the exact epsilon of (epsilon, delta)-differential privacy after several releases.

    Together, the releases are equivalent to one Gaussian mechanism with `mu = sqrt(releases) /
    noise` (see the section on composition in Dong et al., Gaussian differential privacy, arXiv
    1905.02383).

    Args:
        noise: Noise multiplier sigma of each release, greater than 0.
        releases: Number of noisy vectors (1 or more). Each vector is computed from the same
            records, and may also depend on earlier vectors.
        delta: 0 < delta < 1.
    """
    mu = math.sqrt(releases) / noise
    target = math.log(delta)
    if _log_delta(0.0, mu) <= target:
        return 0.0
    # From delta(epsilon) <= Phi(-t) <= exp(-t^2 / 2) with t = epsilon / mu - mu / 2.
    highest = mu * (mu / 2 + math.sqrt(-2 * target))
    root = brentq(lambda eps: _log_delta(eps, mu) - target, 0.0, highest)
    return float(root)  # pyright: ignore


def noise_for(epsilon: float, releases: int, delta: float) -> float:
    """Return the smallest noise multiplier that gives (epsilon, delta)-differential privacy.

    The guarantee is for all releases together. This function is the inverse of the function
    `epsilon`.

    Args:
        epsilon: Epsilon of all releases together, greater than 0.
        releases: Number of releases, 1 or more.
        delta: 0 < delta < 1.
    """
    target = math.log(delta)
    # The same bound as in `epsilon`, solved for mu.
    root = math.sqrt(-2 * target)
    lowest = 2 * epsilon / (math.sqrt(root**2 + 2 * epsilon) + root)
    highest = 2 * lowest
    while _log_delta(epsilon, highest) < target:
        highest *= 2
    mu = brentq(lambda mu: _log_delta(epsilon, mu) - target, lowest, highest)
    return math.sqrt(releases) / float(mu)  # pyright: ignore


def _log_delta(eps: float, mu: float) -> float:
    """Compute the logarithm of `Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)`.

    This difference is the delta of a Gaussian mechanism (Theorem 8 of Balle and Wang, arXiv
    1805.06530). Phi is the distribution function of the standard normal distribution. The formula
    is evaluated in logarithms, because e^eps overflows.
    """
    first = float(log_ndtr(-eps / mu + mu / 2))
    second = eps + float(log_ndtr(-eps / mu - mu / 2))
    # Rounding may leave a difference of 0 if delta is far below all values in use.
    return first + math.log(max(-math.expm1(second - first), 1e-300))

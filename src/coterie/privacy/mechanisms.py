"""Means of a client's records that say little about any one of them: the Gaussian mechanism.

In place of the noise that FedAMoLE (arXiv 2411.19128) adds to embeddings, which is not calibrated
to any record's influence and so guarantees nothing. Two sets of records are neighbours if one
record is replaced by another; their number n is public. The guarantee is for what `private_mean`
returns, not for anything else that was computed from the same records, such as trained weights.
"""

import math

import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr
from torch import Tensor

MOST_EPSILON = 1e9
"""That can be computed with; far less promises nothing any more."""


def private_mean(samples: Tensor, clip: float, noise: float, chance: torch.Generator) -> Tensor:
    """The mean of clipped vectors plus normal noise: (dim,), float32.

    samples: (n, dim), one vector per record, n >= 1; each is scaled to an L2 norm of at most
    `clip`. Replacing one moves the mean by at most `2 clip / n`; the noise's standard deviation is
    `noise` (sigma, a multiplier) times that. What is not a finite number counts as 0, lest one
    record spoil the whole. The noise hides nothing from who can draw it too: `chance`, a CPU
    generator, must be seeded with something that the receiver does not know.
    """
    vectors = samples.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0)
    n, dim = vectors.shape
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    clipped = vectors * (clip / norms.clamp(min=clip))
    drawn = torch.randn(dim, generator=chance, dtype=torch.float64)
    return (clipped.mean(dim=0) + noise * (2 * clip / n) * drawn).float()


def only_noise(samples: Tensor, clip: float, noise: float, chance: torch.Generator) -> Tensor:
    """What `private_mean` would return of vectors that are 0: nothing of these samples is in it."""
    return private_mean(torch.zeros_like(samples), clip, noise, chance)


def epsilon(noise: float, releases: int, delta: float) -> float:
    """The epsilon of (epsilon, delta)-differential privacy after so many releases, exactly.

    noise: the multiplier sigma > 0 of each release; releases: 1 or more vectors computed from the
    same records, with all records in each (later ones may depend on earlier ones); 0 < delta < 1.
    Together they are one Gaussian mechanism with `mu = sqrt(releases) / noise` (Dong et al.,
    Gaussian differential privacy, arXiv 1905.02383, on composition).
    """
    mu = math.sqrt(releases) / noise
    target = math.log(delta)
    if _log_delta(0.0, mu) <= target:
        return 0.0
    # From delta(epsilon) <= Phi(-t) <= exp(-t^2 / 2) with t = epsilon / mu - mu / 2.
    highest = mu * (mu / 2 + math.sqrt(-2 * target))
    found = brentq(lambda eps: _log_delta(eps, mu) - target, 0.0, highest)
    return float(found)  # pyright: ignore


def noise_for(epsilon: float, releases: int, delta: float) -> float:
    """The least multiplier sigma that keeps so many releases (epsilon, delta)-private.

    The inverse of the function `epsilon`, for epsilon > 0.
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
    """log of `Phi(-eps/mu + mu/2) - e^eps Phi(-eps/mu - mu/2)`.

    Theorem 8 of Balle and Wang (arXiv 1805.06530), in logarithms as e^eps soon overflows.
    """
    first = float(log_ndtr(-eps / mu + mu / 2))
    second = eps + float(log_ndtr(-eps / mu - mu / 2))
    # Rounding may leave no difference at all where delta is far below any in use.
    return first + math.log(max(-math.expm1(second - first), 1e-300))

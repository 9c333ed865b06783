"""Weights by which a client chooses with whom it learns; see `methods/auto.py`."""

import math
from collections.abc import Mapping
from statistics import median_low
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor
from typing_extensions import TypedDict

MARGIN = 0.01
"""The difference between slopes, in nats per token, that counts as none."""
LARGEST_EVIDENCE = 3.0
"""The largest evidence, in standard errors."""
SMALLEST_WEIGHT = 0.02
"""The weight below which a client is left out."""
LARGEST_SIZE = 3.0
"""The largest number of training tokens that counts, as a multiple of the clients' median.

Clients report their numbers themselves, so the limit is low."""


class Choice(TypedDict):
    """The message from which the server takes the weights of a client's mean."""

    row: dict[str, Annotated[float, Field(ge=0, le=1)]]
    """The client's weights for all clients, or nothing before its first trial."""
    tokens: Annotated[int, Field(gt=0)]
    """The number of the client's training tokens."""
    trial: bool
    """Whether a trial is due for the client."""


CHOICE = TypeAdapter(Choice)


def shares_of(tokens: Mapping[str, float]) -> dict[str, float]:
    """Return the clients' shares of all training tokens, after a limit on each client's tokens.

    Args:
        tokens: A mapping from clients to numbers of training tokens.
    """
    largest = LARGEST_SIZE * median_low(tokens.values())
    sizes = {client: min(float(count), largest) for client, count in tokens.items()}
    return {client: size / sum(sizes.values()) for client, size in sizes.items()}


def standard_error(samples: Tensor) -> Tensor:
    """Return the standard error of the mean over the first dimension, infinite for one sample."""
    if len(samples) == 1:
        return torch.full_like(samples[0], math.inf)
    return samples.std(0) / math.sqrt(len(samples))


def with_no_change(shares: Mapping[str, float]) -> Tensor:
    """Return the shares, followed by the mean share as the weight of no change, scaled to sum to 1.

    Args:
        shares: A mapping from n clients to shares with a sum of 1.

    Returns:
        A float64 tensor shaped (n + 1,).
    """
    weights = torch.tensor([*shares.values(), 1 / len(shares)], dtype=torch.float64)
    return weights / weights.sum()


def row_from_slopes(
    shares: Mapping[str, float], slopes: Tensor, trust: float, own: str
) -> dict[str, float]:
    """Return a client's weights for all clients (the equations in `methods/auto.py`).

    Args:
        shares: A mapping from n clients to shares with a sum of 1.
        slopes: The slope of each sample's loss along the change of each client, shaped (samples,
            n), in float64.
        trust: The step size with which evidence changes weights (eta).
        own: The name of the client itself.

    Returns:
        The weights, which sum to 1. They are the shares if no other client has a weight.
    """
    prior = with_no_change(shares)
    slopes = torch.cat([slopes, torch.zeros_like(slopes[:, :1])], 1)
    slopes = slopes - slopes @ prior[:, None]
    means, errors = slopes.mean(0), standard_error(slopes)
    sizes = ((means.abs() - errors.clamp(MARGIN)) / errors).nan_to_num()
    evidence = means.sign() * sizes.clamp(0, LARGEST_EVIDENCE)
    weights = torch.softmax(prior.log() - trust * evidence, 0)[:-1]
    weights /= weights.sum()
    row = {n: w for n, w in zip(shares, weights.tolist(), strict=True) if w >= SMALLEST_WEIGHT}
    row = dict(shares) if row.keys() <= {own} else row
    return {name: weight / sum(row.values()) for name, weight in row.items()}

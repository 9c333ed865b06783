"""Averaging weights that a client computes for all clients; see `methods/auto/method.py`."""

import math
from collections.abc import Collection, Mapping
from statistics import median_low
from typing import Annotated

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from coterie.messages import Json, MessageError

MARGIN = 0.01
"""Differences from the mean slope up to this size, in nats per token, are ignored."""
LARGEST_EVIDENCE = 3.0
"""The limit of the evidence, in standard errors."""
SMALLEST_WEIGHT = 0.02
"""The weight below which a client is excluded from the mean."""
LARGEST_SIZE = 3.0
"""The largest number of training tokens that counts, as a multiple of the clients' median.

Clients report their own numbers; a low limit bounds the influence of a false one."""


class Choice(TypedDict):
    """The value `choice` of an upload, which determines the weights of the client's mean."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore
    row: dict[str, Annotated[float, Field(ge=0, le=1)]]
    """The client's weights for all clients, or nothing before its first trial."""
    tokens: Annotated[int, Field(gt=0)]
    """The number of the client's training tokens."""


_CHOICE = TypeAdapter(Choice)
_SIZES = TypeAdapter(dict[str, Annotated[int, Field(gt=0)]])


def checked_choice(client: str, value: Json, known: Collection[str]) -> Choice:
    """Return a client's choice without the weights of clients that have left.

    If no weight remains, the client is alone.

    Args:
        client: The client's name.
        value: The value `choice` of the client's upload.
        known: The names of all clients that have not left.

    Raises:
        MessageError: The choice is invalid.
    """
    try:
        choice = _CHOICE.validate_python(value, strict=True)
    except ValidationError as error:
        raise MessageError(
            f"The client {client!r} sent an invalid choice (weights, or number of tokens)."
        ) from error
    row = {name: weight for name, weight in choice["row"].items() if name in known}
    return {**choice, "row": row if any(row.values()) or not choice["row"] else {client: 1.0}}


def checked_sizes(value: Json, peers: Collection[str]) -> dict[str, int]:
    """Return the numbers of training tokens of other clients.

    Args:
        value: The value `sizes` of a download.
        peers: The names of the other clients whose parameters are in the download.

    Raises:
        MessageError: A number is missing or invalid.
    """
    try:
        sizes = _SIZES.validate_python(value, strict=True)
        return {peer: sizes[peer] for peer in peers}
    except (ValidationError, KeyError) as error:
        raise MessageError(
            "The download has no valid numbers of training tokens of the other clients."
        ) from error


def latest_trial(complete: int, rounds: int) -> int:
    """Return the number of rounds after which the latest trial was due, or 0 if none was.

    Args:
        complete: The number of completed rounds.
        rounds: The number of rounds of the run.
    """
    return 2 ** (min(complete, rounds // 2) + 1).bit_length() // 2 - 1


def shares_of(tokens: Mapping[str, float]) -> dict[str, float]:
    """Return the clients' shares of all training tokens, with a limit on each client's tokens.

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
    """Return the shares and, as the weight of d = 0, their mean, all scaled to a sum of 1.

    Args:
        shares: A mapping from n clients to shares with a sum of 1.

    Returns:
        A float64 tensor shaped (n + 1,).
    """
    weights = torch.tensor([*shares.values(), 1 / len(shares)], dtype=torch.float64)
    return weights / weights.sum()


def with_least_others(row: Mapping[str, float], own: str, least_others: int) -> dict[str, float]:
    """Limit how much of the other clients' total weight one client can have.

    The limit is 1 / `least_others` of this total. The excess goes to the clients below the limit,
    in proportion to their weights. The client's own weight does not change.

    Args:
        row: The client's weights for all clients.
        own: The name of the client that receives the mean.
        least_others: The smallest number of other clients in a mean.

    Returns:
        The weights. Without weights of enough other clients, the client is alone.
    """
    others = sorted(((w, c) for c, w in row.items() if c != own and w > 0), reverse=True)
    if least_others == 1 or not others:
        return dict(row)
    if len(others) < least_others:
        return {own: 1.0}
    weights = [weight for weight, _ in others]
    limit = sum(weights) / least_others
    larger, factor = 0, 1.0  # how many weights exceed the limit, and the factor of the others
    while larger < len(weights) and weights[larger] * factor > limit:
        larger += 1
        rest = sum(weights[larger:])
        factor = (sum(weights) - larger * limit) / rest if rest else 0.0
    limited = {c: limit if i < larger else w * factor for i, (w, c) in enumerate(others)}
    return {client: limited.get(client, weight) for client, weight in row.items()}


def limited_rows(
    rows: Mapping[str, Mapping[str, float]], present: Collection[str], least_others: int
) -> dict[str, Mapping[str, float]]:
    """Limit the weights of other clients in all rows; see `with_least_others`.

    Args:
        rows: The weights of all clients, by the client that receives the mean.
        present: The clients whose uploads are in the means.
        least_others: The smallest number of other clients in a mean.
    """
    if least_others == 1:
        return dict(rows)
    return {
        client: with_least_others(
            {name: weight for name, weight in row.items() if name in present}, client, least_others
        )
        for client, row in rows.items()
    }


def row_from_slopes(
    shares: Mapping[str, float], slopes: Tensor, trust: float, own: str, least_others: int = 1
) -> dict[str, float]:
    """Return a client's weights for all clients (the equations in `methods/auto/method.py`).

    Args:
        shares: A mapping from n clients to shares with a sum of 1.
        slopes: The slope of each sample's loss along the change of each client, shaped (samples,
            n), in float64.
        trust: The step size of the change of weights (eta).
        own: The name of the client whose weights are computed.
        least_others: The smallest number of other clients in a mean; see `with_least_others`.

    Returns:
        The weights, which sum to 1. They are the shares if no other client's weight reaches
        `SMALLEST_WEIGHT`.
    """
    prior = with_no_change(shares)
    slopes = torch.cat([slopes, torch.zeros_like(slopes[:, :1])], 1)
    slopes = slopes - slopes @ prior[:, None]
    means, errors = slopes.mean(0), standard_error(slopes)
    sizes = ((means.abs() - errors.clamp(MARGIN)) / errors).nan_to_num()
    evidence = means.sign() * sizes.clamp(0, LARGEST_EVIDENCE)
    weights = torch.softmax(prior.log() - trust * evidence, 0)[:-1]
    weights /= weights.sum()
    every = dict(zip(shares, weights.tolist(), strict=True))
    row = {name: weight for name, weight in every.items() if weight >= SMALLEST_WEIGHT}
    if row.keys() <= {own}:
        row = dict(shares)
    elif least_others > 1:
        others = sorted(every.keys() - {own}, key=lambda name: (-every[name], name))
        row = {n: w for n, w in every.items() if n in row or n in others[:least_others]}
    row = with_least_others(row, own, least_others)
    return {name: weight / sum(row.values()) for name, weight in row.items()}

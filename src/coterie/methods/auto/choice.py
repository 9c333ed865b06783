"""Averaging weights that a client computes for all clients; see `methods/auto/method.py`."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median_low
from typing import Annotated, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from coterie.messages import Json, MessageError, Tensors

MEMORY = 0.5
"""The factor by which the precision of earlier evidence decreases in each trial."""
MARGIN = 0.01
"""Differences between slopes or losses up to this size, in nats per token, are ignored."""
SMALLEST_WEIGHT = 0.1
"""The weight below which a client is excluded from the mean, as a multiple of the equal share."""
PARTS_OF_ALL = (0.1, 0.2, 0.3, 0.4, 0.5)
"""The weights of the mean of all clients that a client tries after the last round."""
LARGEST_SIZE = 3.0
"""The largest number of training tokens that counts, as a multiple of the clients' median.

Clients report their own numbers; a low limit bounds the influence of a false one."""
GRADIENTS = 4
"""The number of gradients that a client sends in a trial, each of an equal part of its samples."""
Evidence = tuple[float, float]
"""The mean of slopes, in nats per token, and its precision: 1 divided by its variance."""
Weight = Annotated[float, Field(ge=0, le=1)]
T = TypeVar("T")


class Choice(TypedDict):
    """The value `choice` of an upload, which determines the weights of the client's mean."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # pyright: ignore
    row: dict[str, Weight]
    """The client's weights for all clients, or nothing before its first trial."""
    tokens: Annotated[int, Field(gt=0)]
    """The number of the client's training tokens."""


_CHOICE = TypeAdapter(Choice)
_ROW = TypeAdapter(dict[str, Weight])
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
    fault = f"The client {client!r} sent an invalid choice (weights, or number of tokens)."
    choice = _validated(_CHOICE, value, fault)
    row = {name: weight for name, weight in choice["row"].items() if name in known}
    return {**choice, "row": row if any(row.values()) or not choice["row"] else {client: 1.0}}


def checked_sizes(value: Json, peers: Collection[str]) -> dict[str, int]:
    """Return the numbers of training tokens of all other clients.

    Args:
        value: The value `sizes` of a download.
        peers: The names of the other clients whose parameters are in the download.

    Raises:
        MessageError: A number is missing or invalid.
    """
    fault = "The download has no valid numbers of training tokens of the other clients."
    sizes = _validated(_SIZES, value, fault)
    if not sizes.keys() >= {*peers}:
        raise MessageError("The download lacks numbers of training tokens of the other clients.")
    return sizes


def checked_row(value: Json) -> dict[str, float]:
    """Return a client's weights for all clients, from a download.

    Args:
        value: The value `row` of a download.

    Raises:
        MessageError: A weight is invalid.
    """
    return _validated(_ROW, value, "The download has no valid weights of this client.")


def _validated(kind: TypeAdapter[T], value: Json, fault: str) -> T:
    try:
        return kind.validate_python(value, strict=True)
    except ValidationError as error:
        raise MessageError(fault) from error


def latest_trial(complete: int) -> int:
    """Return the number of rounds after which the latest trial was due, or 0 if none was.

    Args:
        complete: The number of completed rounds.
    """
    return 2 ** (complete + 1).bit_length() // 2 - 1


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


def part_of(row: Mapping[str, float], clients: Collection[str]) -> dict[str, float]:
    """Return the weights of some clients, scaled to a sum of 1."""
    part = {client: weight for client, weight in row.items() if client in clients}
    total = sum(part.values())
    return {client: weight / total for client, weight in part.items()} if total else {}


def mixed(
    client: str,
    own: Tensors,
    mean: Tensors,
    pairs: Mapping[str, Tensors],
    row: Mapping[str, float],
    received: Mapping[str, float],
) -> dict[str, Tensor]:
    """Return a client's mean with other weights, as far as the client can compute it.

    Parameters of which the client has those of its peers are averaged. The other parameters lie
    between the client's own ones and the mean that the client has received: exactly at the new mean
    if the client's own weight has not decreased, and the ratios of the others' weights not changed.

    Args:
        client: The client's name.
        own: The client's own parameters.
        mean: The mean that the client has received.
        pairs: The parameters that the client has of some clients, including its own, on any device.
        row: The weights of clients in the new mean. Clients without `pairs` are ignored.
        received: The weights of clients in the received mean.
    """
    row = part_of(row, pairs)
    if not row or row.keys() == {client}:
        return {n: t.detach().clone() for n, t in (own if row else mean).items()}
    weight = received.get(client, 0.0)
    factor = min(1.0, (1 - row.get(client, 0.0)) / (1 - weight)) if weight < 1 else 0.0
    result = {n: torch.lerp(t.detach(), mean[n], factor) for n, t in own.items()}
    for name in next(iter(pairs.values())):
        total = torch.stack([weight * pairs[c][name] for c, weight in row.items()]).sum(0)
        result[name] = total.to(result[name].device)
    return result


def rounded(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors in float16, in which the server forwards the pairs of a trial."""
    largest = torch.finfo(torch.float16).max
    return {n: t.clamp(-largest, largest).to(torch.float16) for n, t in tensors.items()}


def widened(tensors: Tensors) -> dict[str, Tensor]:
    """Return tensors in float32."""
    return {n: t.to(torch.float32) for n, t in tensors.items()}


def at_one_length(changes: Sequence[Tensors]) -> list[Tensors]:
    """Scale changes to the length of the median change."""
    norms = [math.sqrt(sum(t.double().square().sum().item() for t in c.values())) for c in changes]
    median = median_low(norms)
    return [
        {n: t * (median / norm if norm else 0.0) for n, t in change.items()}
        for change, norm in zip(changes, norms, strict=True)
    ]


def updated(
    evidence: Mapping[str, Evidence], slopes: Tensor, shares: Mapping[str, float]
) -> dict[str, Evidence]:
    """Return the evidence after a trial.

    Args:
        evidence: The evidence before the trial.
        slopes: The slope of each sample's loss along the change of each client, shaped (samples,
            n), in float64.
        shares: A mapping from n clients to shares with a sum of 1, in the order of the slopes.

    Returns:
        The evidence about these clients and about all clients with evidence before the trial.
    """
    prior = torch.tensor([*shares.values()], dtype=torch.float64)
    relative = slopes - slopes @ prior[:, None]
    after = dict(evidence)
    for client, mean, error in zip(
        shares, relative.mean(0).tolist(), standard_error(relative).tolist(), strict=True
    ):
        if math.isfinite(error):
            old, precision = evidence.get(client, (0.0, 0.0))
            old_precision, new_precision = MEMORY * precision, 1 / max(error, 1e-9) ** 2
            total = old_precision + new_precision
            after[client] = ((old_precision * old + new_precision * mean) / total, total)
    return after


def excess(evidence: Mapping[str, Evidence]) -> dict[str, float]:
    """Return by how much each client's slope exceeds the lowest one, beyond `MARGIN`.

    Slopes are shrunk towards their mean in proportion to their errors: with a normal prior whose
    variance is estimated from their spread, they are the means of the posterior.
    """
    if not evidence:
        return {}
    variance = max(0.0, fmean(mean**2 - 1 / precision for mean, precision in evidence.values()))
    shrunk = {
        client: mean * variance / (variance + 1 / precision)
        for client, (mean, precision) in evidence.items()
    }
    lowest = min(shrunk.values()) + MARGIN
    return {client: max(0.0, slope - lowest) for client, slope in shrunk.items()}


def row_of(
    shares: Mapping[str, float],
    above: Mapping[str, float],
    step: float,
    own: str,
    least_others: int = 1,
) -> dict[str, float]:
    """Return weights p_j exp(-eta x_j), without the smallest ones, with a sum of 1.

    Args:
        shares: A mapping from all clients to shares with a sum of 1.
        above: The excess x_j of some clients; that of the others is the mean.
        step: The step size (eta), per nat.
        own: The name of the client whose weights are computed.
        least_others: The smallest number of other clients in a mean; see `with_least_others`.
    """
    unknown = fmean(above.values()) if above else 0.0
    logs = torch.tensor(
        [math.log(share) - step * above.get(c, unknown) for c, share in shares.items()],
        dtype=torch.float64,
    )
    every = dict(zip(shares, torch.softmax(logs, 0).tolist(), strict=True))
    smallest = SMALLEST_WEIGHT / len(every)
    others = sorted(every.keys() - {own}, key=lambda name: (-every[name], name))
    needed = others[: least_others if least_others > 1 else 0]
    row = {n: w for n, w in every.items() if w >= smallest or n in needed}
    row = with_least_others(row, own, least_others)
    return {name: weight / sum(row.values()) for name, weight in row.items()}

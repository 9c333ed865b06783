"""Bounds of clients' uploads, which limit the influence of one client on a round's mean.

Trained parameters are bounded by their *change*: the difference from the parameters that the client
received at the start of the round. The norm of the parameters themselves would be unsuitable,
because the initial matrix A of a LoRA pair makes up nearly all of the pair's norm. Each size is
compared with the round's median size (the lower of the two middle sizes if the number of sizes is
even). A minority of clients cannot move the median beyond the sizes of other clients' uploads, so
uploads above the bound are excluded. If exactly half of the uploads are above the bound, either
half may be wrong. No upload is then excluded, but the larger uploads are scaled down to the bound.
Small uploads therefore never exclude large uploads.

A client that still learns may change far more than clients that have learnt their texts. A change
is therefore compared with the client's own last change if that is larger than the median. Only
accepted changes are remembered, and a change above the size with which it was compared is
remembered as that size. Therefore, no change is accepted that exceeds the bound times the largest
median so far.

A change that points against the others' changes is compared with two thirds of the bound. The
bounds do not detect other malicious uploads of ordinary size.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.exchanges.spec import AggregationSpec
from coterie.exchanges.weights import TOKENS, tokens_of
from coterie.messages import Groups, Message
from coterie.transforms.context import Memory

Kind = Literal["change", "norm", "weight"]
SUBJECTS: Mapping[Kind, str] = {
    "change": "the change of its {}",
    "norm": "the norm of its {}",
    "weight": "its number of tokens",
}
"""Descriptions of the three kinds of sizes, for messages. The kinds are the change of a group of
parameters, the norm of a group of other tensors, and the weight of an upload. The key
`aggregation.largest_KIND` is the bound for the sizes of the kind KIND."""
Size = tuple[float, int]
"""The L2 norm of a group, and the number of elements of the group."""
OTHERS = 3
"""The minimum number of other clients with which a change is compared to find its direction."""
AGAINST = -0.04
"""The cosine below which a change points against the median of the others' changes.

In measurements with one mean for all clients, honest clients were above -0.05 in the first four
rounds. In later rounds, honest clients with different texts can point against one another."""
OPPOSED = 2 / 3
"""The share of the bound that applies to changes which point against the others' changes.

The text of honest clients may differ from all others; in measurements, their changes were at most
1.6 times the median."""
SAMPLED = 64
"""The maximum number of elements of a tensor that are used to compare directions of changes."""


@dataclass(frozen=True)
class Measure:
    """The quantities of one upload that are bounded, and the direction of the parameters' change.

    The bounded quantities are the norm of each group of tensors, and the client's weight in the
    mean. All of them are called sizes.
    """

    sizes: Mapping[tuple[Kind, str], Size]
    """The sizes, keyed by kind and group. For the kind `weight`, the group is an empty string."""
    direction: Mapping[str, Tensor] = field(default_factory=dict)
    """A sample of the elements of each parameter's change. The sample is scaled so that its norm
    estimates the norm of the whole change. The keys consist of group, name and shape."""


@dataclass(frozen=True)
class Bound:
    """The limits of one upload: factors that scale its groups of tensors, and a maximum weight."""

    scales: Mapping[str, float] = field(default_factory=dict)
    """The scaling factor of each group that must be scaled. In a group of parameters, the change of
    the parameters is scaled. In a group of other tensors, the tensors themselves are scaled."""
    weight: float = math.inf
    """The upload's maximum weight."""


def exclusions_and_limits(
    rules: AggregationSpec, measures: Mapping[str, Measure], memory: Memory
) -> tuple[dict[str, str], dict[str, Bound]]:
    """Determine which uploads of an exchange are excluded or limited.

    Args:
        rules: The section `aggregation` of the run file.
        measures: The measures of all uploads, by client.
        memory: The state of the exchange. Its value `last` contains the norms of each client's last
            accepted changes (see `compare_with_last`), and is replaced.

    Returns:
        The reasons for exclusions, by the clients whose uploads are excluded, and the limits of
        uploads, by client.
    """
    last: Any = memory.values.get("last", {})
    changes: dict[str, dict[str, float]] = {name: {**last.get(name, {})} for name in measures}
    excluded: dict[str, str] = {}
    opposed = set[str]() if rules.largest_change is None else opposing(measures)
    scales: dict[str, dict[str, float]] = {}
    weights: dict[str, float] = {}
    for (kind, group), sizes in _compared(measures).items():
        limit: float | None = getattr(rules, f"largest_{kind}")
        if limit is None:
            continue
        against = opposed if kind == "change" else set[str]()
        limits = {name: OPPOSED * limit if name in against else limit for name in sizes}
        ratios = of_median = ratios_of(sizes)
        if kind == "change":
            ratios = {
                name: compare_with_last(sizes[name], ratio, changes[name], group)
                for name, ratio in ratios.items()
            }
        larger = {name: r for name, r in ratios.items() if r > limits[name]}
        is_half = 2 * len(larger) == sum(norm > 0 for norm, _ in sizes.values())
        for name, ratio in larger.items():
            if not is_half:
                subject = SUBJECTS[kind].format(group)
                excluded[name] = f"{subject} is {of_median[name]:.3g} times the round's median"
                excluded[name] += " and points against the others'" if name in against else ""
            elif kind == "weight":
                weights[name] = limits[name] * sizes[name][0] / ratio
            else:
                scales.setdefault(name, {})[group] = limits[name] / ratio
    memory.values["last"] = {**last, **changes, **{name: {} for name in excluded}}
    limited = scales.keys() | weights.keys()
    bounds = {n: Bound(scales.get(n, {}), weights.get(n, math.inf)) for n in sorted(limited)}
    return excluded, bounds


def bounded(client: str, upload: Message, reference: Groups, limit: Bound) -> Message:
    """Apply the limits of an upload, and return the limited upload.

    Args:
        client: The client that sent the upload.
        upload: The decoded upload.
        reference: The client's parameters at the start of the round, keyed by group and name.
        limit: The limits.
    """
    values = upload.values
    if TOKENS.name in values and tokens_of(client, upload) > limit.weight:
        values = {**values, TOKENS.name: int(limit.weight)}
    groups = scaled(upload, reference, limit.scales) if limit.scales else upload.groups
    return replace(upload, groups=groups, values=values)


def measured(upload: Message, reference: Groups, weight: float) -> Measure:
    """Measure the norms of an upload's groups, and the direction of the upload's change.

    Args:
        upload: The decoded upload.
        reference: The client's parameters at the start of the round, keyed by group and name.
        weight: The client's weight in the mean. The result also contains the weight, because the
            weight is bounded like the norms.
    """
    sizes: dict[tuple[Kind, str], Size] = {("weight", ""): (weight, 1)}
    direction: dict[str, Tensor] = {}
    for group, tensors in upload.groups.items():
        squares, count = 0.0, 0
        for name, tensor in tensors.items():
            if not (tensor.is_floating_point() and tensor.numel()):
                continue
            change = _change(tensor, reference.get(group, {}).get(name))
            squares += float(torch.linalg.vector_norm(change)) ** 2
            count += tensor.numel()
            if group in reference:
                flat = change.flatten()
                sample = flat[:: math.ceil(len(flat) / SAMPLED)]
                key = f"{group}/{name}/{tuple(tensor.shape)}"  # ranks may differ between clients
                direction[key] = sample * math.sqrt(len(flat) / len(sample))
        if count:
            kind = "change" if group in reference else "norm"
            sizes[kind, group] = math.sqrt(squares), count
    return Measure(sizes, direction)


def ratios_of(sizes: Mapping[str, Size]) -> dict[str, float]:
    """Compute the size of each client's upload as a multiple of the median size.

    Two ratios are computed, and the smaller one is returned. The first ratio is the norm divided by
    the median norm. The second ratio is the root mean square divided by the median root mean
    square. Here, a root mean square is a norm divided by the square root of the number of elements.
    Each ratio alone would be too large for some clients. With AdamW, an upload with more elements
    has a larger norm, so the first ratio is too large for clients with high ranks or many experts.
    With SGD, each element changes more if the rank is smaller, so the second ratio is too large for
    clients with low ranks. The smaller ratio penalises none of these clients. Sizes that are zero
    are ignored in the medians.

    Args:
        sizes: A mapping from each client to the norm and the number of elements of the client's
            upload.
    """
    norms = {name: norm for name, (norm, _) in sizes.items()}
    rms = {name: norm / math.sqrt(count) for name, (norm, count) in sizes.items()}
    medians = [median_low([v for v in values.values() if v] or [1.0]) for values in (norms, rms)]
    return {name: min(norms[name] / medians[0], rms[name] / medians[1]) for name in sorted(sizes)}


def compare_with_last(size: Size, ratio: float, last: dict[str, float], group: str) -> float:
    """Compare a client's change with the larger of the round's median and its last change.

    The last change is the last one of the same group with the same number of elements. Some methods
    train other parameters of a group in every second round.

    Args:
        size: The size of the change.
        ratio: The change as a multiple of the round's median; see `ratios_of`.
        last: The norms of the client's last changes, keyed by group and number of elements. This
            function replaces the norm by that of the change, or by the norm with which the change
            was compared if that is smaller.
        group: The group of parameters.

    Returns:
        The change as a multiple of the norm with which it was compared.
    """
    norm, count = size
    key = f"{group} {count}"
    if last.get(key):
        ratio = min(ratio, norm / last[key])
    if math.isfinite(compared := norm / max(ratio, 1.0)):
        last[key] = compared
    return ratio


def _compared(measures: Mapping[str, Measure]) -> dict[tuple[Kind, str], dict[str, Size]]:
    """Return the sizes of all uploads, arranged by kind of size and by group.

    Only sizes of the same kind and group are compared with each other.

    Returns:
        A nested mapping. An outer key is a pair of a kind of size (see `SUBJECTS`) and a group. An
        inner key is a client whose upload has a size of this kind for this group.
    """
    keys = sorted({key for measure in measures.values() for key in measure.sizes})
    return {
        key: {name: m.sizes[key] for name, m in measures.items() if key in m.sizes} for key in keys
    }


def scaled(upload: Message, reference: Groups, scales: Mapping[str, float]) -> Groups:
    """Scale groups of parameters towards the reference, and groups of other tensors towards zero.

    Args:
        upload: The decoded upload.
        reference: The client's parameters at the start of the round, keyed by group and name.
        scales: The scaling factor of each group that must be scaled; see `Bound.scales`.

    Returns:
        All groups of the upload, including the groups that are not scaled.
    """
    groups = dict(upload.groups)
    for group, scale in scales.items():
        starts = reference.get(group, {})
        groups[group] = {
            name: (t.double() - (1 - scale) * _change(t, starts.get(name))).to(t.dtype)
            if t.is_floating_point()
            else t
            for name, t in groups[group].items()
        }
    return groups


def figures_of(measures: Mapping[str, Measure]) -> dict[str, dict[str, float | None]]:
    """Compute metrics that help to detect hostile clients.

    Returns:
        A nested mapping, whose outer keys are clients and whose inner keys are names of metrics.
        Clients whose uploads contain no parameters are left out. For the metric `ratio`, the change
        of each group of parameters is expressed as a multiple of the round's median change of this
        group; the metric is the largest of these multiples. The metric `cosine` is the cosine
        similarity of the client's change and the median of the other clients' normalised changes,
        taken for each number separately, or None if no other client changed the same parameters. A
        minority of hostile clients cannot reverse this median, but could reverse a sum.
    """
    ratios: dict[str, float] = {}
    for (kind, _), sizes in _compared(measures).items():
        for name, ratio in ratios_of(sizes).items() if kind == "change" else ():
            ratios[name] = max(ratios.get(name, 0.0), min(ratio, sys.float_info.max))
    cosines = _cosines({name: _unit(measures[name].direction) for name in sorted(ratios)})
    return {name: {"ratio": ratios[name], "cosine": cosines[name]} for name in sorted(ratios)}


def _change(tensor: Tensor, start: Tensor | None) -> Tensor:
    """Subtract `start` from a tensor and return the result in float64.

    If `start` is larger than the tensor in some dimensions, only its first elements in these
    dimensions are used. Nothing is subtracted if `start` is None, if it is smaller than the tensor
    in some dimension, or if the numbers of dimensions differ.
    """
    # A client with a smaller rank has only the first rows or columns of the server's tensor.
    tensor = tensor.double()
    if start is None or start.dim() != tensor.dim():
        return tensor
    start = start.detach()[tuple(slice(size) for size in tensor.shape)]
    return tensor - start.double() if start.shape == tensor.shape else tensor


def _unit(direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(t)) ** 2 for t in direction.values()))
    return {key: t / norm for key, t in direction.items()} if 0 < norm < math.inf else {}


def _cosines(units: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float | None]:
    """Compare each client's change with the median of the other clients' changes.

    Args:
        units: For each client, a mapping from keys to its normalised changes.

    Returns:
        Each client's cosine similarity, over the keys that another client also has. None if
        there is no such key, or if the median is zero.
    """
    products = {name: [0.0, 0.0, 0.0] for name in units}  # client x median, and both squares
    for key in sorted({key for unit in units.values() for key in unit}):
        names = [name for name, unit in units.items() if key in unit]
        if len(names) < 2:
            continue
        changes = torch.stack([units[name][key] for name in names])
        medians = medians_of_others(changes)
        for name, change, median in zip(names, changes, medians, strict=True):
            added = change @ median, change @ change, median @ median
            products[name] = [a + float(b) for a, b in zip(products[name], added, strict=True)]
    return {
        name: dot / math.sqrt(own * others) if own * others > 1e-12 else None
        for name, (dot, own, others) in products.items()
    }


def opposing(measures: Mapping[str, Measure]) -> set[str]:
    """Return the clients whose changes point against the median of at least `OTHERS` others."""
    cosines = _cosines({n: unit for n, m in measures.items() if (unit := _unit(m.direction))})
    if len(cosines) <= OTHERS:
        return set()
    return {name for name, cosine in cosines.items() if cosine is not None and cosine < AGAINST}


def medians_of_others(rows: Tensor) -> Tensor:
    """Return, for each row, the median of all other rows, for each column separately.

    The median of an even number of values is the mean of the two middle values.

    Args:
        rows: A tensor shaped (n, columns), where n >= 2.

    Returns:
        A tensor of the same shape. All medians come from one sorting of the columns.
    """
    values, order = rows.sort(dim=0, stable=True)
    ranks = order.argsort(dim=0)
    middle = []
    for place in {(len(rows) - 2) // 2, (len(rows) - 1) // 2}:
        moved = (ranks <= place).long()  # without a smaller value, the others move down
        middle.append(values.gather(0, place + moved))
    return torch.stack(middle).mean(dim=0)

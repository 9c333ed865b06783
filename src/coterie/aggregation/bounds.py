"""How far one client's upload may move a round's mean.

Trained parameters are bounded by their *change*, the difference from what the client received at
the start of the round: the initial A of a LoRA pair makes up nearly all of the pair's norm, and
would hide it. Every size is compared with the round's median, the smaller one of an even number.
Fewer than half of the clients cannot move it beyond what other clients send: their uploads are
excluded from the round if they are too large. If exactly half of the uploads are too large, nobody
can tell which half is wrong: all count, and the larger ones are scaled down to the bound. So small
uploads never exclude large ones.

This is no defence against uploads of an ordinary size that are wrong.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.aggregation.spec import BoundsSpec
from coterie.aggregation.transform import Transform
from coterie.aggregation.weights import TOKENS, tokens_of
from coterie.messages import Groups, Json, Message
from coterie.messages.names import CHANGE
from coterie.messages.schema import Reduce

Kind = Literal["change", "norm", "weight"]
WHAT: Mapping[Kind, str] = {
    "change": "the change of its {}",
    "norm": "the norm of its {}",
    "weight": "its number of tokens",
}
"""What is compared of groups of parameters, of other groups, and of an upload as a whole; limited
by `largest_change`, `largest_norm` and `largest_weight`."""
Size = tuple[float, int]
"""The L2 norm of a group's numbers, and how many they are."""
SAMPLED = 64
"""Entries of each tensor by which the directions of changes are compared."""


@dataclass(frozen=True)
class Measure:
    """The sizes of one upload."""

    sizes: Mapping[tuple[Kind, str], Size]
    """By what is compared, and the group of it; the weight has no group."""
    direction: Mapping[str, Tensor] = field(default_factory=dict)
    """Some entries of each parameter's change, by group, name and shape, scaled so that their norm
    estimates that of the whole."""


@dataclass(frozen=True)
class Bound:
    """The limits that a round sets for one upload."""

    scales: Mapping[str, float] = field(default_factory=dict)
    """By group, the factor of its change, or of its numbers where these are no parameters."""
    weight: float = math.inf
    """The largest weight with which it counts."""


class Bounds(Transform, BoundsSpec):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Uploads that are much larger than the round's median are excluded, or scaled down."""

    name: ClassVar[str] = "bounds"
    summary: ClassVar[str] = "uploads much larger than the round's median are excluded"
    reductions: ClassVar[frozenset[Reduce]] = frozenset()

    def join(self, client: str, hello: Message) -> int:
        """Return the client's weight: some methods weigh for themselves."""
        return tokens_of(client, hello) if TOKENS.name in hello.values else 1

    def measure(self, upload: Message, reference: Groups, joined: Any) -> Measure:
        """Return the sizes of an upload, which are compared with those of other uploads."""
        return measured(upload, reference, joined or 1)

    def refuse(self, measures: Mapping[str, Measure]) -> dict[str, str | Bound]:
        """Return the clients whose uploads are too large: why, or their limits if a half is."""
        excluded: dict[str, str] = {}
        scales: dict[str, dict[str, float]] = {}
        weights: dict[str, float] = {}
        for (kind, group), sizes in _compared(measures).items():
            limit: float | None = getattr(self, f"largest_{kind}")
            if limit is None:
                continue
            larger = {name: ratio for name, ratio in ratios_of(sizes).items() if ratio > limit}
            half = 2 * len(larger) == sum(norm > 0 for norm, _ in sizes.values())
            for name, ratio in larger.items():
                if not half:
                    what = WHAT[kind].format(group)
                    excluded[name] = f"{what} is {ratio:.3g} times the round's median"
                elif kind == "weight":
                    weights[name] = limit * sizes[name][0] / ratio
                else:
                    scales.setdefault(name, {})[group] = limit / ratio
        limited = {
            name: Bound(scales.get(name, {}), weights.get(name, math.inf))
            for name in sorted(scales.keys() | weights.keys())
        }
        return limited | excluded

    def bounded(self, client: str, upload: Message, reference: Groups, limit: Bound) -> Message:
        """Return an upload of a half that is too large, scaled down to the bound."""
        values = upload.values
        if TOKENS.name in values and tokens_of(client, upload) > limit.weight:
            values = {**values, TOKENS.name: int(limit.weight)}
        groups = scaled(upload, reference, limit.scales) if limit.scales else upload.groups
        return replace(upload, groups=groups, values=values)

    def figures(self, measures: Mapping[str, Measure]) -> dict[str, dict[str, Json]]:
        """Return two figures of each client's upload; see `figures_of`."""
        return {name: {CHANGE: found} for name, found in figures_of(measures).items()}


def measured(upload: Message, reference: Groups, weight: float) -> Measure:
    """Return the sizes of an upload; `reference` is what its parameters started from, by group."""
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
                some = flat[:: math.ceil(len(flat) / SAMPLED)]
                key = f"{group}/{name}/{tuple(tensor.shape)}"  # ranks may differ
                direction[key] = some * math.sqrt(len(flat) / len(some))
        if count:
            kind = "change" if group in reference else "norm"
            sizes[kind, group] = math.sqrt(squares), count
    return Measure(sizes, direction)


def ratios_of(sizes: Mapping[str, Size]) -> dict[str, float]:
    """Return each client's size as a multiple of the median of those that are not zero: of the
    norms, or of the norms over the roots of the counts, whichever ratio is smaller.

    Clients may have different ranks or numbers of experts. With AdamW, their norms then grow with
    the counts; with SGD, a smaller rank has a larger change for each parameter.
    """
    norms = {name: norm for name, (norm, _) in sizes.items()}
    means = {name: norm / math.sqrt(count) for name, (norm, count) in sizes.items()}
    medians = [median_low([v for v in by.values() if v] or [1.0]) for by in (norms, means)]
    return {name: min(norms[name] / medians[0], means[name] / medians[1]) for name in sorted(sizes)}


def _compared(measures: Mapping[str, Measure]) -> dict[tuple[Kind, str], dict[str, Size]]:
    """Return the sizes that are compared with one another, each by client."""
    keys = sorted({key for measure in measures.values() for key in measure.sizes})
    return {
        key: {name: one.sizes[key] for name, one in measures.items() if key in one.sizes}
        for key in keys
    }


def scaled(upload: Message, reference: Groups, scales: Mapping[str, float]) -> Groups:
    """Return an upload's groups, some of them scaled towards the reference, or towards zero."""
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
    """Return two figures of each client's upload by which hostile ones stand out.

    `ratio` is the largest change of a group as a multiple of the round's median. `cosine` is
    between the client's change and the sum of the others', each scaled to a norm of 1 (None without
    others). Only uploads of parameters have them.
    """
    ratios: dict[str, float] = {}
    for (kind, _), sizes in _compared(measures).items():
        for name, ratio in ratios_of(sizes).items() if kind == "change" else ():
            ratios[name] = max(ratios.get(name, 0.0), min(ratio, sys.float_info.max))
    units = {name: _unit(measures[name].direction) for name in sorted(ratios)}
    total: dict[str, Tensor] = {}
    for unit in units.values():
        for key, part in unit.items():
            total[key] = total[key] + part if key in total else part
    return {
        name: {"ratio": ratios[name], "cosine": _cosine(unit, total)}
        for name, unit in units.items()
    }


def _change(tensor: Tensor, start: Tensor | None) -> Tensor:
    """The difference from the start, whose tail a client may have cut off; else the tensor."""
    tensor = tensor.double()
    if start is None or start.dim() != tensor.dim():
        return tensor
    start = start.detach().cpu()[tuple(slice(size) for size in tensor.shape)]
    return tensor - start.double() if start.shape == tensor.shape else tensor


def _unit(direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(t)) ** 2 for t in direction.values()))
    return {key: t / norm for key, t in direction.items()} if 0 < norm < math.inf else {}


def _cosine(unit: Mapping[str, Tensor], total: Mapping[str, Tensor]) -> float | None:
    """The cosine between one unit vector and the sum of the others, where both have entries."""
    dot, squares = 0.0, 0.0
    for key, part in unit.items():
        others = total[key] - part
        dot, squares = dot + float(part @ others), squares + float(others @ others)
    return dot / math.sqrt(squares) if squares > 1e-12 else None

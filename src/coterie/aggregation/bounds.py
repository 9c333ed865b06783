"""How much one upload may weigh: far more than honest clients send, and too little to end a run.

This keeps a broken client, or one that is crudely hostile, from taking a run with it. It is no
defence against uploads of an ordinary size that are wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

import torch

from coterie.exchange import Message


@dataclass(frozen=True)
class Measure:
    """What is compared of an upload."""

    norms: Mapping[str, float]
    """By group: the L2 norm of its floating-point numbers, over the root of how many they are."""
    weight: float


def norms_of(upload: Message) -> dict[str, float]:
    """By group, as in `Measure`."""
    found = {}
    for group, tensors in upload.groups.items():
        floats = [t.double() for t in tensors.values() if t.is_floating_point() and t.numel()]
        if floats:
            squares = sum(float(torch.linalg.vector_norm(t)) ** 2 for t in floats)
            found[group] = math.sqrt(squares / sum(t.numel() for t in floats))
    return found


def left_out(
    measures: Mapping[str, Measure], norm: float | None, weight: float | None
) -> dict[str, str]:
    """The clients whose uploads do not count, and why; `norm`, `weight`: times the median, at most.

    Of an even number the smaller median counts: who sends far too much is not half of the measure.
    """
    quantities = {
        f"its {group}": ({n: m.norms[group] for n, m in measures.items() if group in m.norms}, norm)
        for group in sorted({group for measure in measures.values() for group in measure.norms})
    }
    quantities["its number of tokens"] = {n: m.weight for n, m in measures.items()}, weight
    found: dict[str, str] = {}
    for what, (sizes, times) in quantities.items():
        middle = median_low(sizes.values()) if sizes else 0.0
        for name, size in sorted(sizes.items()):
            if times is not None and middle and size > times * middle:
                found[name] = f"{what} is {size / middle:.3g} times the round's median"
    return found

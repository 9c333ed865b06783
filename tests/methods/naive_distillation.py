"""Slow versions of the targets that a student learns at each position."""

import math

import torch
from naive_transfer import in_dictionary
from torch import Tensor

from coterie.alignment.knowledge import Knowledge
from coterie.methods.fedmkt.distillation import NO_TEACHER, Distiller

TOP = 4
"""Tokens that are sent per position."""


def counterpart(distiller: Distiller, sample: int, end: int, offer: Knowledge) -> int | None:
    """Return the teacher's position in a sample that ends at a character, or None."""
    keys = offer.samples.tolist()
    key = int(distiller.positions.samples[sample])
    if key not in keys or end < 0:
        return None
    span = range(*offer.starts[keys.index(key) : keys.index(key) + 2].tolist())
    return next((place for place in span if offer.ends[place] == end), None)


def naive(
    distiller: Distiller,
    teachers: list[int],
    offers: dict[int, Knowledge],
    own: Knowledge,
    ids: Tensor | None = None,
) -> Tensor:
    """Return the target of each position, (p, vocabulary)."""
    rows = []
    method, size = distiller.settings, len(distiller.context.base.tokenizer)
    same = list(range(size))
    mapped = same if ids is None else ids.tolist()

    def prediction(by: Knowledge, sample: int, place: int, ids: list[int]) -> Tensor:
        position = counterpart(distiller, sample, int(distiller.positions.ends[place]), by)
        probs: dict[int, float] = {}
        if position is not None:
            tokens, logprobs = (t[position, :TOP].tolist() for t in (by.tokens, by.logprobs))
            probs, _ = in_dictionary(tokens, logprobs, ids, method.temperature)
        return spread(probs or {int(distiller.labels[place]): 1.0}, size)

    keys = own.samples.tolist()
    for sample, teacher in enumerate(teachers):
        key = int(distiller.positions.samples[sample])
        loss = own.losses[keys.index(key)].item() if key in keys else math.inf
        for place in range(*distiller.positions.starts[sample : sample + 2].tolist()):
            label = spread({int(distiller.labels[place]): 1.0}, size)
            own_target = label if method.own == "labels" else prediction(own, sample, place, same)
            if teacher == NO_TEACHER:
                rows.append(own_target)
                continue
            wanted = prediction(offers[teacher], sample, place, mapped)
            if method.own == "mean":
                a, b = math.exp(-loss), math.exp(-distiller.best_losses[sample].item())
                wanted = (a * own_target + b * wanted) / (a + b)
            rows.append(wanted)
    return torch.stack(rows)


def spread(probs: dict[int, float], size: int) -> Tensor:
    row = torch.zeros(size)
    for token, share in probs.items():
        row[token] = share
    return row

"""What a student is to learn at each position, the slow and obvious way."""

import math

import torch
from torch import Tensor

from coterie.alignment.knowledge import Knowledge
from coterie.alignment.transfer import SoftTargets
from coterie.bases import Base
from coterie.methods.fedmkt.distillation import NO_TEACHER, Distiller

TOP = 4
"""Tokens that are sent per position."""


def as_dict(
    theirs: Knowledge, place: int, ids: Tensor | None, temperature: float
) -> dict[int, float]:
    """A prediction in the distiller's tokens: the first of equal ones is kept."""
    kept: dict[int, float] = {}
    for token, logprob in zip(
        theirs.tokens[place, :TOP].tolist(), theirs.logprobs[place, :TOP].tolist(), strict=True
    ):
        mine = token if ids is None else int(ids[token])
        if mine >= 0:
            kept.setdefault(mine, logprob)
    total = sum(math.exp(value / temperature) for value in kept.values())
    return {token: math.exp(value / temperature) / total for token, value in kept.items()}


def counterpart(distiller: Distiller, sample: int, end: int, theirs: Knowledge) -> int | None:
    """The teacher's position in this sample at which so many characters have been read."""
    keys = theirs.samples.tolist()
    key = int(distiller.positions.samples[sample])
    if key not in keys or end < 0:
        return None
    span = range(*theirs.starts[keys.index(key) : keys.index(key) + 2].tolist())
    return next((place for place in span if theirs.ends[place] == end), None)


def naive(
    distiller: Distiller,
    teachers: list[int],
    offers: dict[int, Knowledge],
    own: Knowledge,
    ids: Tensor | None = None,
) -> Tensor:
    """What is to be learnt at each position, (p, vocabulary)."""
    rows = []
    method, size = distiller.settings, len(distiller.context.base.tokenizer)

    def said(by: Knowledge, sample: int, place: int, ids: Tensor | None) -> Tensor:
        there = counterpart(distiller, sample, int(distiller.positions.ends[place]), by)
        found = {} if there is None else as_dict(by, there, ids, method.temperature)
        found = found or {int(distiller.labels[place]): 1.0}
        return spread(found, size)

    keys = own.samples.tolist()
    for sample, teacher in enumerate(teachers):
        key = int(distiller.positions.samples[sample])
        loss = own.losses[keys.index(key)].item() if key in keys else math.inf
        for place in range(*distiller.positions.starts[sample : sample + 2].tolist()):
            label = spread({int(distiller.labels[place]): 1.0}, size)
            mine = label if method.own == "labels" else said(own, sample, place, None)
            if teacher == NO_TEACHER:
                rows.append(mine)
                continue
            theirs = said(offers[teacher], sample, place, ids)
            if method.own == "mean":
                a, b = math.exp(-loss), math.exp(-distiller.best_losses[sample].item())
                theirs = (a * mine + b * theirs) / (a + b)
            rows.append(theirs)
    return torch.stack(rows)


def spread(found: dict[int, float], size: int) -> Tensor:
    row = torch.zeros(size)
    for token, share in found.items():
        row[token] = share
    return row


def dense(shares: SoftTargets, base: Base) -> Tensor:
    size = len(base.tokenizer)
    return torch.zeros(len(shares.mass), size).scatter_add_(1, shares.tokens, shares.probs)

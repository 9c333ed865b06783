"""Runs of `auto`: forged downloads and uploads, and a slow version of a trial's equations."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median_low, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from turns import nth

from coterie.messages import Message
from coterie.testing.rounds import close, step

NAMES: tuple[str, ...] = ("diarist", "poet", "whaler")
AUTO: dict[str, Any] = {"name": "auto", "router": {"every": 2, "steps": 1}}
Tensors = Mapping[str, Tensor]
Change = Callable[[Message], Message]


def auto(**settings: Any) -> dict[str, Any]:
    """Return the key `method` of a run file, with some settings."""
    return AUTO | settings


def chosen(upload: Message, **choice: Any) -> Message:
    """Return an upload with other keys in its value `choice`."""
    return replace(upload, values={"choice": {**upload.values["choice"], **choice}})


def altered(upload: Message, change: Callable[[str, Tensor], Tensor]) -> Message:
    """Return an upload with other tensors."""
    tensors = {name: change(name, t) for name, t in upload["adapter"].items()}
    return replace(upload, groups={"adapter": tensors})


def forged_round(
    local: Any,
    round: int,
    forge: Mapping[str, Change] | None = None,
    present: Iterable[str] | None = None,
) -> tuple[dict[str, Message], dict[str, Message]]:
    """Execute an exchange in which some clients' uploads are changed.

    Returns:
        The clients' downloads and uploads.
    """
    names = sorted(present or local.clients)
    local.open(nth(round), names)
    downloads = {n: local.schema.receive("down", local.download(n)) for n in names}
    uploads = {n: step(local, n, round, downloads[n]) for n in names}
    for name, change in (forge or {}).items():
        uploads[name] = local.schema.receive("up", local.schema.send("up", change(uploads[name])))
    close(local, round, uploads)
    return downloads, uploads


def whole(client: Any, tensors: Tensors, round: int = 1, **more: Any) -> Message:
    """Return a download with values for all tensors that the server sends after a round."""
    method = client.method
    names = method.downloaded(client.parameters(), round % method.every == 0)
    return Message(round, {"adapter": {name: tensors[name] for name in names}}, **more)


def copies(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def equal(one: Tensors, other: Tensors) -> bool:
    assert one.keys() == other.keys() != set()
    return all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)


def noise(tensors: Tensors, size: float, seed: int) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return {n: size * torch.randn(t.shape, generator=chance) for n, t in tensors.items()}


def judging_windows(local: Any, name: str, samples: int = 16) -> list[Tensor]:
    """Return every second window of a client's validation text, or an even selection of these."""
    window = local.config.data.window + 1
    ids = local.clients.participants[name].data.validation.ids.long()
    windows = [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]
    ours = windows[1::2] or windows
    count = min(samples, len(ours))
    return [ours[i * len(ours) // count] for i in range(count)]


def window_losses(client: Any, windows: list[Tensor]) -> list[Tensor]:
    """Return the loss of each window, from all logits."""
    model = client.model()
    return [F.cross_entropy(model(input_ids=w[None, :-1]).logits[0], w[1:]) for w in windows]


@dataclass
class Trial:
    """A slow version of the first step of the module docstring of `auto`."""

    row: dict[str, float]
    limited: int
    """The number of clients whose evidence reached the limit."""
    ignored: int
    """The number of clients whose slope differs from the mean slope by less than 0.01, or by less
    than a standard error."""
    small: int
    """The number of ignored clients whose slope differs from the mean slope by more than two
    standard errors."""
    noisy: int
    """The number of ignored clients whose slope differs from the mean slope by more than 0.01."""
    dropped: list[str]
    fell_back: bool


def trial(
    client: Any,
    windows: list[Tensor],
    initial: Tensors,
    pairs: Mapping[str, Tensors],
    tokens: Mapping[str, int],
) -> Trial:
    """Compute the weights of a client, with Python's numbers.

    Args:
        client: The client; its own pairs are in `pairs`, too.
        windows: The samples on which it judges.
        initial: The pairs at the start of the run.
        pairs: The pairs of all clients.
        tokens: The number of training tokens of all clients.
    """
    method, own = client.method, client.context.name
    most = 3 * median_low(tokens.values())
    prior = {name: float(min(tokens[name], most)) for name in sorted(pairs)}
    shares = [*prior.values(), fmean(prior.values())]  # the last direction is zero
    shares = [share / sum(shares) for share in shares]
    changes = [{n: pairs[name][n] - t for n, t in initial.items()} for name in prior]
    changes.append({n: torch.zeros_like(t) for n, t in initial.items()})
    judged = {n: client.adapter.tensors()[n] for n in initial}
    before = copies(judged)
    for name, tensor in judged.items():
        tensor.requires_grad_()
        mean = sum(s * change[name].double() for s, change in zip(shares, changes, strict=True))
        tensor.data.copy_(initial[name] + mean)
    slopes: list[list[float]] = [[] for _ in changes]
    for loss in window_losses(client, windows):
        gradients = dict(zip(judged, torch.autograd.grad(loss, [*judged.values()]), strict=True))
        for j, change in enumerate(changes):
            products = [(gradients[n].double() * change[n].double()).sum() for n in judged]
            slopes[j].append(float(sum(products)))
    for name, tensor in judged.items():
        tensor.data.copy_(before[name])
    averages = [
        sum(s * row[i] for s, row in zip(shares, slopes, strict=True)) for i in range(len(windows))
    ]
    means, errors, evidence = [], [], []
    for row in slopes:
        relative = [slope - average for slope, average in zip(row, averages, strict=True)]
        s, error = fmean(relative), stdev(relative) / math.sqrt(len(relative))
        means.append(s)
        errors.append(error)
        evidence.append(math.copysign(min(max(abs(s) - max(error, 0.01), 0) / error, 3), s))
    weights = [s * math.exp(-method.trust * e) for s, e in zip(shares, evidence, strict=True)][:-1]
    row = {n: w / sum(weights) for n, w in zip(prior, weights, strict=True)}
    kept = {name: weight for name, weight in row.items() if weight >= 0.02}
    fell_back = not kept.keys() - {own}
    if fell_back:
        kept = prior
    row = {name: weight / sum(kept.values()) for name, weight in kept.items()}
    sizes = [*zip(map(abs, means[:-1]), errors[:-1], strict=True)]
    return Trial(
        row,
        limited=sum(abs(e) == 3 for e in evidence[:-1]),
        ignored=sum(e == 0 for e in evidence[:-1]),
        small=sum(2 * error < s < 0.01 for s, error in sizes),
        noisy=sum(0.01 < s < error for s, error in sizes),
        dropped=sorted(prior.keys() - row.keys()),
        fell_back=fell_back,
    )

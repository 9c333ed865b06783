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
from coterie.methods.tensors import copied, copy
from coterie.testing.rounds import close, joined, step

NAMES: tuple[str, ...] = ("diarist", "poet", "whaler")
AUTO: dict[str, Any] = {"name": "auto", "router": {"every": 2, "steps": 1}}
Tensors = Mapping[str, Tensor]
Change = Callable[[Message], Message]


def auto(**settings: Any) -> dict[str, Any]:
    """Return the key `method` of a run file, with some settings."""
    return AUTO | settings


def started(config: Any, texts: Mapping[str, str], **changes: Any) -> Any:
    """Return a run, before its first exchange, whose clients have the texts of some writers."""
    clients = [{"name": name, "path": f"{text}.txt"} for name, text in texts.items()]
    training = {"steps": 1, "batch": 1, "precision": "fp32"}
    return joined(config(**{"clients": clients, "rounds": 6, "training": training} | changes))


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


def along_gradient(client: Any, windows: list[Tensor], initial: Tensors, by: float) -> Tensors:
    """Return the pairs after a step along the gradient of the loss, at a small change."""
    tensors = {n: client.adapter.tensors()[n].requires_grad_() for n in initial}
    before = copied(tensors)
    copy({n: t + 0.02 * torch.ones_like(t) for n, t in initial.items()}, tensors)
    loss = torch.stack(window_losses(client, windows)).mean()
    gradients = torch.autograd.grad(loss, [*tensors.values()])
    copy(before, tensors)
    return {n: initial[n] + by * g for n, g in zip(tensors, gradients, strict=True)}


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


def naive_row(
    shares: Mapping[str, float], slopes: list[list[float]], trust: float, own: str
) -> tuple[dict[str, float], list[float], list[tuple[float, float]]]:
    """Compute the weights of a client from slopes, with Python's numbers.

    Args:
        shares: The clients' shares, by name; they need not sum to 1.
        slopes: The slopes of each sample, for every client, in the order of the names.
        trust: The setting of this name.
        own: The client that judges.

    Returns:
        The weights by name, the evidence, and the means and standard errors of the slopes.
    """
    prior = [*shares.values(), fmean(shares.values())]  # the last direction is zero
    prior = [share / sum(prior) for share in prior]
    averages = [sum(p * s for p, s in zip(prior, row, strict=False)) for row in slopes]
    evidence, figures = [], []
    for column in zip(*slopes, strict=True):
        relative = [slope - average for slope, average in zip(column, averages, strict=True)]
        s, error = fmean(relative), stdev(relative) / math.sqrt(len(relative))
        figures.append((s, error))
        evidence.append(math.copysign(min(max(abs(s) - max(error, 0.01), 0) / error, 3), s))
    weights = [s * math.exp(-trust * e) for s, e in zip(prior, evidence, strict=False)]
    row = {n: w / sum(weights) for n, w in zip(shares, weights, strict=True)}
    kept = {name: weight for name, weight in row.items() if weight >= 0.02}
    kept = kept if kept.keys() - {own} else dict(shares)
    return {name: w / sum(kept.values()) for name, w in kept.items()}, evidence, figures


def trial(
    client: Any,
    windows: list[Tensor],
    initial: Tensors,
    pairs: Mapping[str, Tensors],
    tokens: Mapping[str, int],
) -> Trial:
    """Compute the weights of a client.

    Args:
        client: The client; its own pairs are in `pairs`, too.
        windows: The samples on which it judges.
        initial: The pairs at the start of the run.
        pairs: The pairs of all clients.
        tokens: The number of training tokens of all clients.
    """
    most = 3 * median_low(tokens.values())
    prior = {name: float(min(tokens[name], most)) for name in sorted(pairs)}
    total = sum(prior.values()) * (1 + 1 / len(prior))  # a client without a change has a share
    changes = [{n: pairs[name][n] - t for n, t in initial.items()} for name in prior]
    judged = {n: client.adapter.tensors()[n] for n in initial}
    before = copied(judged)
    for name, tensor in judged.items():
        tensor.requires_grad_()
        terms = zip(prior.values(), changes, strict=True)
        mean = sum(share / total * change[name].double() for share, change in terms)
        tensor.data.copy_(initial[name] + mean)
    slopes = []
    for loss in window_losses(client, windows):
        gradients = dict(zip(judged, torch.autograd.grad(loss, [*judged.values()]), strict=True))
        g = {n: gradient.double() for n, gradient in gradients.items()}
        slopes.append([sum(float((g[n] * c[n].double()).sum()) for n in g) for c in changes])
    for name, tensor in judged.items():
        tensor.data.copy_(before[name])
    row, evidence, figures = naive_row(prior, slopes, client.method.trust, client.context.name)
    sizes = [(abs(s), error) for s, error in figures]
    return Trial(
        row,
        limited=sum(abs(e) == 3 for e in evidence),
        ignored=sum(e == 0 for e in evidence),
        small=sum(2 * error < s < 0.01 for s, error in sizes),
        noisy=sum(0.01 < s < error for s, error in sizes),
        dropped=sorted(prior.keys() - row.keys()),
    )

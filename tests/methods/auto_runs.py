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


def naive_evidence(
    slopes: list[list[float]], shares: Mapping[str, float], evidence: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Compute the evidence after a trial, with Python's numbers.

    Args:
        slopes: The slopes of each sample, for every client, in the order of the shares.
        shares: The clients' shares, by name, with a sum of 1.
        evidence: The evidence before the trial.
    """
    after = dict(evidence)
    averages = [sum(p * s for p, s in zip(shares.values(), r, strict=True)) for r in slopes]
    for name, column in zip(shares, zip(*slopes, strict=True), strict=True):
        relative = [slope - average for slope, average in zip(column, averages, strict=True)]
        new = 1 / (stdev(relative) / math.sqrt(len(relative))) ** 2
        mean, precision = after.get(name, (0.0, 0.0))
        total = precision / 2 + new
        after[name] = ((precision / 2 * mean + new * fmean(relative)) / total, total)
    return after


def naive_excess(evidence: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Compute each client's excess, with Python's numbers."""
    variance = max(0.0, fmean(mean * mean - 1 / p for mean, p in evidence.values()))
    slopes = {n: mean * variance / (variance + 1 / p) for n, (mean, p) in evidence.items()}
    return {n: max(0.0, slope - min(slopes.values()) - 0.01) for n, slope in slopes.items()}


def naive_row(
    shares: Mapping[str, float], above: Mapping[str, float], trust: float, own: str
) -> dict[str, float]:
    """Compute weights from an excess, with Python's numbers."""
    others = fmean(above.values())
    weights = {n: p * math.exp(-trust * above.get(n, others)) for n, p in shares.items()}
    total = sum(weights.values())
    kept = {n: w for n, w in weights.items() if w / total >= 0.1 / len(shares)}
    return {name: w / sum(kept.values()) for name, w in kept.items()}


@dataclass
class Trial:
    """A slow version of a trial; see the module docstring of `auto`."""

    evidence: dict[str, tuple[float, float]]
    excess: dict[str, float]
    row: dict[str, float]
    """The weights after the trial."""
    start: dict[str, Tensor]
    """The parameters from which the client continues."""


def trial(
    client: Any,
    windows: list[Tensor],
    mean: Tensors,
    pairs: Mapping[str, Tensors],
    tokens: Mapping[str, int],
) -> Trial:
    """Compute the weights of a client that has the parameters before its download.

    Args:
        client: The client.
        windows: The samples on which it judges.
        mean: The received mean. What is missing has not been received.
        pairs: The judged parameters of all clients, including the client's own.
        tokens: The number of training tokens of all clients.
    """
    name, own = client.context.name, copied(client.shared)
    most = 3 * median_low(tokens.values())
    sizes = {n: float(min(count, most)) for n, count in sorted(tokens.items())}
    shares = {n: size / sum(sizes.values()) for n, size in sizes.items()}
    received = client.row or shares

    def start(row: Mapping[str, float]) -> dict[str, Tensor]:
        held = sum(weight for c, weight in row.items() if c in pairs)
        part = {c: weight / held for c, weight in row.items() if c in pairs}
        left = min(1, (1 - part.get(name, 0)) / (1 - received.get(name, 0)))
        result = {n: t + left * (mean.get(n, t) - t) for n, t in own.items()}
        if part == {name: 1.0}:
            return own
        for n in client.judged:
            result[n] = sum(w * pairs[c][n] for c, w in part.items())  # pyright: ignore
        return result

    copy(start(shares), client.shared)
    lengths = {
        c: math.sqrt(sum(float((t[n] - client.initial[n]).double().square().sum()) for n in t))
        for c, t in pairs.items()
    }
    length, slopes = median_low(lengths.values()), []
    for tensor in client.judged.values():
        tensor.requires_grad_()
    for loss in window_losses(client, windows):
        gradients = torch.autograd.grad(loss, [*client.judged.values()])
        g = {n: t.double() for n, t in zip(client.judged, gradients, strict=True)}
        products = {
            c: sum(float((g[n] * (t[n] - client.initial[n]).double()).sum()) for n in g)
            for c, t in sorted(pairs.items())
        }
        slopes.append([p * length / lengths[c] for c, p in products.items()])
    held = {c: p for c, p in shares.items() if c in pairs}
    held = {c: p / sum(held.values()) for c, p in held.items()}
    evidence = naive_evidence(slopes, held, client.evidence)
    copy(own, client.shared)
    above = naive_excess(evidence)
    row = naive_row(shares, above, client.method.trust, name)
    losses = []
    for point in (start(row), own):
        copy(point, client.shared)
        with torch.no_grad():
            losses.append([loss.item() for loss in window_losses(client, windows)])
    copy(own, client.shared)
    single = [a - b for a, b in zip(*losses, strict=True)]
    groups = [fmean(single[i : i + 4]) for i in range(0, len(single), 4)]
    error = stdev(groups) / math.sqrt(len(groups)) if len(groups) > 1 else math.inf
    if fmean(groups) - error > 0.01:
        row = {name: 1.0}
    return Trial(evidence, above, row, start(row))

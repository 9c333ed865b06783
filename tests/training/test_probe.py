"""Losses and slopes of single samples equal slow versions, for every kind of data."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import equal, fill
from torch import Tensor
from torch.nn import functional as F

from coterie.config.run import parse
from coterie.data.kinds.text import Tokens
from coterie.losses.tokens import Batch
from coterie.methods.tensors import copied, copy
from coterie.testing.rounds import joined
from coterie.training.probe import probe_batch, sample_slopes

WINDOWS = {"text": 16, "instructions": 48, "preferences": 40}
STEP = 3e-3
"""The step of the finite differences along a direction of norm 1."""


@pytest.fixture(params=WINDOWS)
def client(request: pytest.FixtureRequest, values, questions: Path, opinions: Path) -> Any:
    """A client of `auto` with one kind of data and an adapter that changes the base's output."""
    shares, kind = {"fractions": {"validation": 0.3}}, request.param
    data: dict[str, dict[str, Any]] = {
        "text": {"limits": {"train": 2000, "validation": 200, "test": 200}},
        "instructions": {"instructions": {"template": "{{ instruction }}?"}, **shares},
        "preferences": {"preferences": True, **shares},
    }
    changes: dict[str, Any] = {"data": {"window": WINDOWS[kind], **data[kind]}}
    if kind != "text":
        changes |= {"data_root": str(opinions if kind == "preferences" else questions)}
        changes |= {"clients": [{"name": "poet", "path": "poet.jsonl"}]}
    client = joined(parse(values(method="auto", **changes))).clients["poet"]
    fill({name: p.tensor for name, p in client.parameters().items()}, 0.1, 3)
    return client


def lengths(rows: Batch) -> list[int]:
    """Return the number of tokens of each row, without padding."""
    if rows.real is None:
        return [rows.ids.shape[1]] * len(rows.ids)
    return [int(count) + 1 for count in rows.real.sum(1)]


def token_losses(model: Any, rows: Batch) -> list[Tensor]:
    """Return the losses of each row's counted tokens; rows are computed alone and without padding.

    This is a slow version that computes all logits.
    """
    losses = []
    for row, length in enumerate(lengths(rows)):
        ids = rows.ids[row, :length].long()
        logits = model(input_ids=ids[None]).logits[0, :-1].double()
        each = -logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        counted = None if rows.counted is None else rows.counted[row, : length - 1]
        losses.append(each if counted is None else each[counted])
    return losses


def naive_losses(model: Any, batch: Any) -> Tensor:
    """Return the mean loss of each sample; for pairs, the loss of DPO (equation 7)."""
    if isinstance(batch, Batch):
        return torch.stack([losses.mean() for losses in token_losses(model, batch)])
    sums = torch.stack([losses.sum() for losses in token_losses(model, batch.rows)])
    rewards = batch.reference.beta * (-sums.view(-1, 2) - batch.reference.logprobs)
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1])


def test_slopes_are_finite_differences_of_the_losses(client) -> None:
    context, chance = client.context, torch.Generator().manual_seed(4)
    judged = client.adapter.tensors(client.method.judges)
    client.adapter.require_grad(client.method.judges)
    batch = probe_batch(context.data.validation, context.window, 4)
    directions = [
        {name: torch.randn(t.shape, generator=chance) for name, t in judged.items()}
        for _ in range(2)
    ]
    for direction in directions:
        norm = math.sqrt(sum(float(t.square().sum()) for t in direction.values()))
        direction.update({name: t / norm for name, t in direction.items()})
    directions.append({name: torch.zeros_like(t) for name, t in judged.items()})
    before = copied(judged)
    slopes = sample_slopes(context, client.model(), batch, judged, directions)
    assert equal(judged, before)
    assert all(p.tensor.grad is None for p in client.parameters().values())

    def moved(direction: dict[str, Tensor], step: float) -> Tensor:
        copy({name: t + step * direction[name] for name, t in before.items()}, judged)
        with torch.no_grad():
            return naive_losses(client.model(), batch)

    differences = torch.stack(
        [(moved(d, STEP) - moved(d, -STEP)) / (2 * STEP) for d in directions], 1
    )
    assert slopes.shape == (4, 3)
    assert not slopes[:, 2].any()
    assert differences.abs()[:, :2].max() > 0.01
    assert torch.allclose(slopes, differences, rtol=1e-2, atol=2e-4)
    assert slopes[:, :2].std(0).min() > 10 * 2e-4  # samples differ by far more than the tolerance


EVENLY = [(45, 1, [0]), (45, 3, [0, 3, 6]), (45, 4, [0, 2, 4, 6]), (44, 20, range(8))]
"""Numbers of tokens and of samples at most, and the windows of five tokens that are used."""


@pytest.mark.parametrize(("tokens", "most", "windows"), EVENLY)
def test_samples_are_evenly_spaced(tokens: int, most: int, windows: Sequence[int]) -> None:
    split = Tokens(torch.arange(tokens, dtype=torch.int32), tokens)
    expected = [list(range(5 * window, 5 * window + 5)) for window in windows]
    assert probe_batch(split, 4, most).ids.tolist() == expected

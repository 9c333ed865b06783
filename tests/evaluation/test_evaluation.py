"""Perplexity over every token once, against transformers on the bare base; padded batches."""

import math

import pytest
import torch

from coterie.bases import Base, load_base
from coterie.data.kinds.text import Tokens
from coterie.evaluation.evaluate import evaluate, mean_loss, top_logits
from coterie.losses.tokens import Batch
from coterie.testing.small import TOKENS


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("count", [5, 64, 203])
def test_the_score_is_transformers_loss_on_the_bare_base(bases, family, count) -> None:
    base = load_base(str(bases / family), "fp32", 16)
    ids = torch.randint(1, TOKENS, (count,), generator=torch.Generator().manual_seed(count))
    size = len(str(base.tokenizer.decode(ids)).encode())
    score = evaluate(base, base.model, Tokens(ids.int(), size), window=16, batch=3)
    # The slow way: one window at a time, every token predicted from those before it in its window.
    stream = torch.cat([torch.tensor([base.context_token]), ids])
    nats, predicted = [], []
    with torch.no_grad():
        for start in range(0, count, 16):
            window = stream[start : start + 17][None]
            nats.append(base.model(window, labels=window).loss.item() * (window.shape[1] - 1))
            predicted.append(window.shape[1] - 1)
    assert score.items() == {"nats": pytest.approx(nats, rel=1e-4), "tokens": predicted}
    assert score.tokens == sum(predicted) == count
    assert score.nats == pytest.approx(sum(nats), rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(sum(nats) / count), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-5)


LENGTHS, FIRST = (9, 4, 12, 2), (3, 3, 8, 1)
"""The number of tokens of each of four samples, and the first token that is scored."""


def padded() -> tuple[list[torch.Tensor], Batch]:
    """Return the samples, and a batch that contains them."""
    chance = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, TOKENS, (n,), generator=chance) for n in LENGTHS]
    ids = torch.zeros(4, 12, dtype=torch.int64)
    counted, real = torch.zeros(2, 4, 12, dtype=torch.bool)
    for number, (row, first) in enumerate(zip(rows, FIRST, strict=True)):
        ids[number, : len(row)] = row
        counted[number, first : len(row)] = real[number, : len(row)] = True
    return rows, Batch(ids, counted[:, 1:], real[:, 1:])


def logits_alone(base: Base, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits (tokens, vocabulary) of scored tokens, each sample computed alone."""
    with torch.no_grad():
        logits = [base.model(row[None, :-1]).logits[0] for row in rows]
    return torch.cat([part[first - 1 :] for part, first in zip(logits, FIRST, strict=True)])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_mean_loss_is_over_counted_tokens(bases, family) -> None:
    base = load_base(str(bases / family), "fp32", 16)
    rows, batch = padded()
    targets = torch.cat([row[first:] for row, first in zip(rows, FIRST, strict=True)])
    expected = torch.nn.functional.cross_entropy(logits_alone(base, rows), targets).item()
    for at_once in (1, 3, 16):
        assert mean_loss(base, base.model, batch, at_once) == pytest.approx(expected, rel=1e-5)
    full = Batch(batch.ids)
    whole = torch.nn.functional.cross_entropy(
        base.model(batch.ids[:, :-1]).logits.flatten(0, 1), batch.ids[:, 1:].flatten()
    )
    assert mean_loss(base, base.model, full, 3) == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_top_logits_are_those_after_the_last_token_of_each_sample(bases, family) -> None:
    base = load_base(str(bases / family), "fp32", 16)
    _, batch = padded()
    assert batch.real is not None
    rows = [row[: int(real.sum())] for row, real in zip(batch.ids, batch.real, strict=True)]
    for samples, read in ((batch, rows), (Batch(batch.ids), list(batch.ids[:, :-1]))):
        best = torch.stack([base.model(row[None]).logits[0, -1] for row in read]).topk(3)
        values, places = top_logits(base, samples, 3, at_once=2)
        order = best.indices.argsort(-1)
        assert torch.equal(places, best.indices.gather(-1, order))
        torch.testing.assert_close(values, best.values.gather(-1, order))

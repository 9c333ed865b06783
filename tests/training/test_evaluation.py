"""Perplexity over every token once, against transformers on the bare base."""

import math

import pytest
import torch

from coterie.base import load_base
from coterie.data import Tokens
from coterie.training.evaluation import evaluate


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("count", [5, 64, 203])
def test_the_score_is_transformers_loss_on_the_bare_base(bases, family, count) -> None:
    base = load_base(str(bases / family), "fp32", 16)
    chance = torch.Generator().manual_seed(count)
    ids = torch.randint(1, 8192, (count,), generator=chance)
    size = len(str(base.tokenizer.decode(ids)).encode())
    score = evaluate(base, base.model, Tokens(ids.int(), size), window=16, batch=3)
    # The slow way: one window at a time, every token predicted from those before it in its window.
    stream = torch.cat([torch.tensor([base.context_token]), ids])
    nats, predicted = 0.0, 0
    with torch.no_grad():
        for start in range(0, count, 16):
            window = stream[start : start + 17][None]
            loss = base.model(window, labels=window).loss
            assert loss is not None
            nats += loss.item() * (window.shape[1] - 1)
            predicted += window.shape[1] - 1
    assert score.tokens == predicted == count
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_the_batch_does_not_change_the_score(bases) -> None:
    base = load_base(str(bases / "gpt2"), "fp32", 16)
    ids = torch.randint(1, 8192, (150,), generator=torch.Generator().manual_seed(0)).int()
    one = evaluate(base, base.model, Tokens(ids, 600), 16, batch=1)
    many = evaluate(base, base.model, Tokens(ids, 600), 16, batch=8)
    assert one.nats == pytest.approx(many.nats, rel=1e-6)

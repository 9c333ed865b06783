"""The likeliest tokens of answers, against one unpadded row at a time."""

from typing import Any

import pytest
import torch
from tensors import fill
from torch import Tensor

from coterie.adapters import Adapter, Layout
from coterie.bases import Base, load_base
from coterie.data.examples import Encoding, Examples
from coterie.data.items import Instruction
from coterie.data.kinds.instructions import examples
from coterie.data.parts import bare_encoder
from coterie.evaluation.evaluate import evaluate
from coterie.losses import head
from coterie.training.predictions import predictions

ITEMS = [
    Instruction("Who purrs?\n", "cat"),
    Instruction("Of all the animals that you have heard of, who trumpets? ", "an old elephant"),
    Instruction("Who barks?", "dog"),
    Instruction("Nobody?\n", ""),
    Instruction("Ünïcödé?", "naïve 😀"),
]


@pytest.fixture(params=["gpt2", "llama"])
def base(request, bases) -> Base:
    base = load_base(str(bases / request.param), "fp32", 64)
    adapter = Adapter(base.model, Layout(), seed=0, client="ada", common=lambda _: False)
    fill(adapter.tensors(), 0.3, 5)
    adapter.attach(base.model)
    return base


def encoded(base: Base) -> Examples:
    encoder, end = bare_encoder(base.tokenizer)
    ends = base.context_token, end
    return examples(ITEMS, Encoding(encoder, ends, 60, None, "The public text"))


@torch.no_grad()
def alone(base: Base, samples: Examples) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (p, vocabulary) and the next token (p,) of all positions."""
    logprobs, targets = [], []
    spans = zip(samples.starts, samples.answers, samples.starts[1:], strict=False)
    for start, answer, end in (map(int, span) for span in spans):
        ids = samples.ids[start:end].long()
        logits = base.model(ids[None, :-1]).logits[0, answer - start - 1 :].double()
        logprobs.append(logits.log_softmax(-1))
        targets.append(samples.ids[answer:end].long())
    return torch.cat(logprobs), torch.cat(targets)


@pytest.mark.parametrize("batch", [1, 2, 3, 16])
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_predictions_are_those_of_rows_alone(base, batch, at_once, monkeypatch) -> None:
    # The numbers of samples and of logits at a time make no difference.
    samples = encoded(base)
    logprobs, targets = alone(base, samples)
    size = logprobs.shape[1]
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", at_once * size)
    got = predictions(base, base.model, samples, 7, batch)
    assert got.tokens.shape == got.logprobs.shape == (int(samples.lengths.sum()), 7)
    assert got.tokens.dtype == torch.int64
    near: Any = {"rtol": 0, "atol": 1e-4}
    values, _ = logprobs.topk(7)
    torch.testing.assert_close(got.logprobs.double(), values, **near)
    assert (got.logprobs.diff() <= 0).all()
    # By what they are worth: of two that are equally likely, either may come first.
    torch.testing.assert_close(logprobs.gather(1, got.tokens), values, **near)
    assert all(len(set(row)) == 7 for row in got.tokens.tolist())
    torch.testing.assert_close(got.lognorm.double(), values.logsumexp(-1), **near)
    assert (got.lognorm <= 0).all()
    nats = -logprobs.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(got.nats.double(), nats, **near)


def test_nats_are_those_of_the_score(base) -> None:
    samples = encoded(base)
    got = predictions(base, base.model, samples, 3, 2)
    score: Any = evaluate(base, base.model, samples, 60, 2)
    assert score.tokens == len(got.nats)
    assert got.nats.sum().item() == pytest.approx(score.nats, rel=1e-5)


def test_of_more_than_there_are_all_are_told(base) -> None:
    samples = encoded(base)
    size = base.model.config.vocab_size
    got = predictions(base, base.model, samples, size + 5, 2)
    assert got.tokens.shape == (int(samples.lengths.sum()), size)
    assert torch.equal(got.tokens.sort().values[0], torch.arange(size))
    assert got.lognorm.abs().max() < 1e-5


def test_a_head_that_is_not_plain_gives_the_models_own_logits(base, monkeypatch) -> None:
    samples = encoded(base)
    monkeypatch.setattr(base.model.config, "logit_scale", 0.5, raising=False)
    got = predictions(base, base.model, samples, 7, 2)
    values, _ = alone(base, samples)[0].topk(7)
    torch.testing.assert_close(got.logprobs.double(), values, rtol=0, atol=1e-4)

"""DPO's loss, gradient and rewards beside the slow way and beside TRL's."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from coterie.data.kinds.preferences import PairBatch, dpo_loss
from coterie.inference.reference import reference_of
from coterie.losses import head
from coterie.losses import tokens as loss_module
from coterie.losses.preferences import Rewards, rewards
from coterie.losses.tokens import Batch
from coterie.training.spec import DPOSpec

ROWS = [
    ([3, 1, 4], [15, 9, 2, 0], [6, 5, 0]),
    ([8, 9, 7, 9], [3, 2, 0], [38, 46, 26, 43, 0]),
    ([3, 3], [8, 32, 0], [7, 0]),
]
"""Prompts, chosen and rejected answers; the end of text is 0."""
TRL = {"loss": 0.6661281585693359, "chosen": 0.1460229903459549, "rejected": 0.09032869338989258}
TRL |= {"margin": 0.05569429323077202, "accuracy": 1.0}
"""What TRL 1.16.0's `DPOTrainer.compute_loss` makes of ROWS with `waves(0.0)` as the model,
`waves(0.5)` as `ref_model`, and beta 0.3 (torch 2.13.0, transformers 5.23.0, fp32, CPU). The ids
were given to its `DataCollatorForPreference`; the rewards are those that it logs."""
TRL_GRADIENT = 0.011467511765658855
"""The norm of its loss's gradient at the first layer's `mlp.c_fc.weight`."""


def waves(phase: float) -> Any:
    """Return a GPT-2 whose weights are a formula, not random."""
    rates: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    sizes: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, **sizes, **rates)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            place = torch.arange(parameter.numel(), dtype=torch.float64)
            wave = (place * 0.37 + number + phase).sin().view(parameter.shape)
            parameter.copy_(wave * 0.4)
    return model


def logprob(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Return the sum over an answer's tokens, from all logits of one sample."""
    ids = torch.tensor([prompt + answer])
    logits = model(input_ids=ids).logits[0, :-1]
    shares = F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return shares.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


def naive(model: Any, reference: Tensor, beta: float, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and the rewards (n, 2)."""
    sums = [torch.stack([logprob(model, p, answer) for answer in both]) for p, *both in ROWS]
    rewards = beta * (torch.stack(sums) - reference)
    h = rewards[:, 0] - rewards[:, 1]
    p = 1 / (1 + (-h).exp())
    return -((1 - eps) * p.log() + eps * (1 - p).log()).mean(), rewards


@torch.no_grad()
def referred(model: Any) -> Tensor:
    return naive(model, torch.zeros(()), 1.0, 0.0)[1].double()


def batch_of(reference: Tensor, beta: float, eps: float = 0.0) -> PairBatch:
    rows = [(prompt, answer) for prompt, *answers in ROWS for answer in answers]
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    ids = pad([torch.tensor(p + a) for p, a in rows])
    real = pad([torch.ones(len(p + a), dtype=torch.bool) for p, a in rows])
    counted = pad([torch.arange(len(p + a)) >= len(p) for p, a in rows])
    lengths = counted.sum(1).view(-1, 2)
    dpo = DPOSpec(beta=beta, label_smoothing=eps)
    known = reference_of(reference, lengths, "fp32", dpo)
    rows = Batch(ids, counted[:, 1:], real[:, 1:])
    return PairBatch(rows, torch.full((len(ROWS),), 2), known)


def only_the_mlp(model: Any) -> Any:
    """Freeze all weights but one, and return this one."""
    model.requires_grad_(False)
    return model.transformer.h[0].mlp.c_fc.weight.requires_grad_(True)


def test_it_is_the_loss_of_trl() -> None:
    model = waves(0.0)
    weight = only_the_mlp(model)
    loss, rewards = dpo_loss(model, batch_of(referred(waves(0.5)), 0.3))
    loss.backward()
    assert loss.item() == pytest.approx(TRL["loss"], abs=2e-6)
    assert weight.grad.norm().item() == pytest.approx(TRL_GRADIENT, rel=1e-4)
    parts = [Rewards(*(t[rows] for t in rewards)) for rows in (slice(2), slice(2, None))]
    figures = Rewards.figures(parts)
    assert figures == {k: pytest.approx(TRL[k], abs=2e-6) for k in figures}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loss_gradient_and_rewards_equal_the_naive_version(dtype, eps, frozen, monkeypatch) -> None:
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 200)
    monkeypatch.setitem(loss_module.PIECE_COST, "cpu", 0)  # samples are read apart
    model, reference = waves(0.0).to(dtype), referred(waves(0.5).double())
    weight = only_the_mlp(model)
    model.lm_head.weight.requires_grad_(not frozen)
    wanted, rewards = naive(model, reference.to(dtype), 0.7, eps)
    wanted.backward()
    gradient, weight.grad = weight.grad, None
    loss, actual = dpo_loss(model, batch_of(reference, 0.7, eps))
    loss.backward()
    near = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(loss, wanted, rtol=near, atol=near)
    torch.testing.assert_close(actual.values, rewards.detach(), rtol=near, atol=10 * near)
    torch.testing.assert_close(weight.grad, gradient, rtol=near, atol=near)


def test_the_pieces_gradients_add_up_to_the_wholes() -> None:
    model = waves(0.0).double()
    weight = only_the_mlp(model)
    batch = batch_of(referred(waves(0.5)), 0.3)
    dpo_loss(model, batch)[0].backward()
    whole, weight.grad = weight.grad, None
    parts = list(batch.by_length().split(2))
    assert [part.terms for part in parts] == [2, 1]
    for part in parts:
        (dpo_loss(model, part)[0] * part.terms / batch.terms).backward()
    torch.testing.assert_close(weight.grad, whole)


def test_under_the_reference_itself_a_pair_is_half_right() -> None:
    model = waves(0.0)
    loss, rewards = dpo_loss(model, batch_of(referred(model), 0.3, 0.1))
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
    assert rewards.values.abs().max() < 1e-5
    assert Rewards.figures([rewards])["accuracy"] == 0.5


@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_margins_within_rounding_are_ties_and_real_ones_count(precision, beta) -> None:
    # The bound is relative to the likelihoods, and independent of beta.
    logprobs = torch.tensor([[-2.0, -3.0], [-120.0, -80.0], [-4000.0, -3900.0]]).double()
    lengths = torch.tensor([[2, 3], [40, 25], [900, 950]])
    reference = reference_of(logprobs, lengths, precision, DPOSpec(beta=beta))
    epsilon = torch.finfo(torch.float32 if precision == "fp32" else torch.bfloat16).eps
    unit = epsilon * (logprobs.square() / lengths).sum(1).sqrt()
    for factor, right in ((0.0, 0.5), (1.5, 0.5), (-1.5, 0.5), (40.0, 1.0), (-40.0, 0.0)):
        actual = rewards(logprobs + torch.stack([factor * unit, 0 * unit], 1), reference)
        assert actual.preferred.tolist() == 3 * [right]
        assert Rewards.figures([actual])["accuracy"] == right

"""The fused loss against plain cross-entropy, and frozen weights cast once against autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters import Adapter, detach
from coterie.bases.precision import autocast, cast_frozen
from coterie.losses.tokens import language_model_loss, token_losses


def cross_entropy(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def gradients(loss: Tensor, adapter: Adapter) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(adapter.tensors().values())))


def compare(loss: Tensor, expected: Tensor, adapter: Adapter) -> None:
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    both = (gradients(3 * loss, adapter), gradients(3 * expected, adapter))
    torch.testing.assert_close(*both, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("plain")
def test_loss_and_gradients_equal_cross_entropy(base, adapter, ids) -> None:
    expected = cross_entropy(base, ids)
    compare(language_model_loss(base, ids), expected.mean(), adapter)
    losses = token_losses(base, ids)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    torch.testing.assert_close(losses, expected.float(), rtol=0, atol=1e-6)
    with torch.no_grad():
        mean = language_model_loss(base, ids)
    torch.testing.assert_close(mean, expected.mean(), rtol=0, atol=1e-9)


def test_under_autocast_near_the_plain_loss(base, adapter, ids) -> None:
    base.float()
    with autocast("bf16", "cpu"):
        loss, expected = language_model_loss(base, ids), cross_entropy(base, ids).float().mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for a, b in zip(gradients(loss, adapter), gradients(expected, adapter), strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98


def test_weights_cast_once_give_the_same_bits(base, adapter, ids) -> None:
    base.float()
    norms = [p for n, p in base.named_parameters() if "norm" in n or "ln_" in n]

    def step() -> list[Tensor]:
        with autocast("bf16", "cpu"):
            loss = language_model_loss(base, ids)
            return [loss, base(ids).logits, token_losses(base, ids), *gradients(loss, adapter)]

    expected = step()
    cast_frozen(base, torch.bfloat16)
    assert all(map(torch.equal, step(), expected))
    assert base.get_input_embeddings().weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in [*norms, *adapter.tensors().values()])
    assert not any("cast" in name for name in base.state_dict())
    detach(base)
    mlp = next(m for n, m in base.named_modules() if n.endswith("0.mlp"))
    assert {p.dtype for p in mlp.parameters()} == {torch.bfloat16}


def test_precision_fp32_is_no_autocast() -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    cases: list[tuple[Any, torch.dtype]] = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    for precision, dtype in cases:
        with autocast(precision, "cpu"):
            assert (a @ b).dtype == dtype

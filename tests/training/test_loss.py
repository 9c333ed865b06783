"""The fused loss against plain cross-entropy, and frozen weights cast once against autocast."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from coterie.adapters import Adapter, Layout, detach, of_roles
from coterie.bases.precision import autocast, cast_frozen
from coterie.losses import head
from coterie.losses.tokens import language_model_loss, token_losses


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        n_layer=2, n_embd=12, n_head=2, n_positions=32, vocab_size=61, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(tied: bool) -> PreTrainedModel:
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=12, intermediate_size=20, num_attention_heads=2,
        vocab_size=61, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trained(base: PreTrainedModel) -> Adapter:
    """An adapter with non-zero values, attached and requiring gradients."""
    adapter = Adapter(base, Layout(), seed=0, client="ada", common=lambda _: False)
    chance = torch.Generator().manual_seed(5)
    for parameter in adapter.tensors().values():
        parameter.data.normal_(std=0.3, generator=chance)
    adapter.require_grad(of_roles("dense", "generalist", "specialist", "router"))
    adapter.attach(base)
    return adapter


@pytest.fixture(params=["gpt2", "llama", "llama, tied"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", 61 * 5)  # 21 tokens: five pieces
    torch.manual_seed(0)
    return gpt2() if request.param == "gpt2" else llama("tied" in request.param)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(61, (3, 8), generator=torch.Generator().manual_seed(1))


def plain(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def gradients(loss: Tensor, adapter: Adapter) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(adapter.tensors().values())))


def test_loss_and_gradients_equal_cross_entropy(base: PreTrainedModel, ids: Tensor) -> None:
    base.double()
    adapter = trained(base)
    loss = language_model_loss(base, ids)
    expected = plain(base, ids).mean()
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    for a, b in zip(gradients(3 * loss, adapter), gradients(3 * expected, adapter), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_padded_samples_are_as_each_by_itself(base: PreTrainedModel, ids: Tensor) -> None:
    """Of two samples, the last three tokens of the one and the last two of the shorter one."""
    base.double()
    adapter = trained(base)
    ids[1, 5:] = 0
    counted = torch.zeros(3, 7, dtype=torch.bool)
    counted[0, 4:] = counted[1, 2:4] = True
    real = torch.ones(3, 7, dtype=torch.bool)
    real[1, 4:] = False
    expected = torch.cat([plain(base, ids[:1])[0, 4:], plain(base, ids[1:2, :5])[0, 2:4]])
    loss = language_model_loss(base, ids, counted, real)
    torch.testing.assert_close(loss, expected.mean(), rtol=0, atol=1e-9)
    for a, b in zip(gradients(loss, adapter), gradients(expected.mean(), adapter), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    losses = token_losses(base, ids, counted, real)
    torch.testing.assert_close(losses[counted], expected.float(), rtol=0, atol=1e-6)
    assert not losses[~counted].any()


def test_without_gradient(base: PreTrainedModel, ids: Tensor) -> None:
    base.double()
    trained(base)
    expected = plain(base, ids)
    losses = token_losses(base, ids)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    torch.testing.assert_close(losses, expected.float(), rtol=0, atol=1e-6)
    with torch.no_grad():
        mean = language_model_loss(base, ids)
    torch.testing.assert_close(mean, expected.mean(), rtol=0, atol=1e-9)


def test_a_trained_head_gets_its_gradient(base: PreTrainedModel, ids: Tensor) -> None:
    base.double()
    head = base.lm_head.weight
    assert isinstance(head, Tensor)
    expected = torch.autograd.grad(plain(base, ids).mean(), head)[0]
    got = torch.autograd.grad(language_model_loss(base, ids), head)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(token_losses(base, ids), plain(base, ids).float())


def test_under_autocast_near_the_plain_loss(base: PreTrainedModel, ids: Tensor) -> None:
    adapter = trained(base)
    with autocast("bf16", "cpu"):
        loss, expected = language_model_loss(base, ids), plain(base, ids).float().mean()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for a, b in zip(gradients(loss, adapter), gradients(expected, adapter), strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.98


def test_weights_cast_once_give_the_same_bits(base: PreTrainedModel, ids: Tensor) -> None:
    adapter = trained(base)
    norms = [p for n, p in base.named_parameters() if "norm" in n or "ln_" in n]

    def step() -> list[Tensor]:
        with autocast("bf16", "cpu"):
            loss = language_model_loss(base, ids)
            return [loss, base(ids).logits, token_losses(base, ids), *gradients(loss, adapter)]

    expected = step()
    cast_frozen(base, torch.bfloat16)
    for got, want in zip(step(), expected, strict=True):
        assert torch.equal(got, want)
    assert base.get_input_embeddings().weight.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in [*norms, *adapter.tensors().values()])
    linears = [m for n, m in base.named_modules() if n.endswith(("c_fc", "gate_proj"))]
    assert linears
    kept = base.state_dict()
    assert not any("cast" in name for name in kept)
    detach(base)
    mlp = next(m for n, m in base.named_modules() if n.endswith("0.mlp"))
    assert {p.dtype for p in mlp.parameters()} == {torch.bfloat16}


def test_a_capped_head_falls_back_to_the_models_own_logits(
    base: PreTrainedModel, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    base.double()
    trained(base)
    monkeypatch.setattr(base.config, "logit_scale", 0.5, raising=False)
    torch.testing.assert_close(language_model_loss(base, ids), plain(base, ids).mean())
    torch.testing.assert_close(token_losses(base, ids), plain(base, ids).float())


def test_precision_fp32_is_no_autocast() -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    with autocast("fp32", "cpu"):
        assert (a @ b).dtype == torch.float32
    with autocast("bf16", "cpu"):
        assert (a @ b).dtype == torch.bfloat16

"""Cross-entropy to shares of several tokens, against log_softmax of all logits in float64."""

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

from coterie.adapters import Adapter, Layout, of_roles
from coterie.bases.precision import autocast
from coterie.losses import head
from coterie.losses.tokens import Batch, language_model_loss, logits_in_pieces, soft_target_loss

VOCABULARY = 61


@pytest.fixture(params=["gpt2", "llama"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """With an adapter that is not zero, in float64; 21 tokens' logits are made in five pieces."""
    monkeypatch.setitem(head.LOGITS_AT_ONCE, "cpu", VOCABULARY * 5)
    torch.manual_seed(0)
    if request.param == "llama":
        llama = LlamaConfig(
            num_hidden_layers=2, hidden_size=12, intermediate_size=20, num_attention_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=32, tie_word_embeddings=False,
        )  # fmt: skip
        return LlamaForCausalLM(llama).double().eval()
    gpt2 = GPT2Config(
        n_layer=2, n_embd=12, n_head=2, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(gpt2).double().eval()


@pytest.fixture
def adapter(base: PreTrainedModel) -> Adapter:
    found = Adapter(base, Layout(), seed=0, client="ada", common=lambda _: False)
    chance = torch.Generator().manual_seed(5)
    for parameter in found.tensors().values():
        parameter.data.normal_(std=0.3, generator=chance)
    base.requires_grad_(False)
    found.require_grad(of_roles("dense", "generalist", "specialist", "router"))
    found.attach(base)
    return found


def batches() -> dict[str, Batch]:
    """All tokens of three samples; and the last of two, one of which is padded."""
    ids = torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(1))
    counted = torch.zeros(3, 7, dtype=torch.bool)
    counted[0, 4:] = counted[1, 2:4] = True
    real = torch.ones(3, 7, dtype=torch.bool)
    real[1, 4:] = False
    return {
        "all": Batch(ids),
        "masked": Batch(ids * F.pad(real, (1, 0), value=True), counted, real),
    }


BATCHES = batches()


def dense(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Counted tokens' logits, each sample read alone: (n, vocabulary)."""
    found = []
    for row, ids in enumerate(batch.ids):
        length = 7 if batch.real is None else int(batch.real[row].sum())
        logits = model(ids[None, :length]).logits[0]
        found.append(logits if batch.counted is None else logits[batch.counted[row, :length]])
    return torch.cat(found)


def some(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Targets of which some stand twice in a row, and shares of which some are 0."""
    chance = torch.Generator().manual_seed(2)
    targets = torch.randint(VOCABULARY, (n, k), generator=chance)
    targets[::2, -1] = targets[::2, 0]
    shares = torch.rand(n, k, generator=chance)
    shares[1, 1:] = 0
    return targets, shares / shares.sum(1, keepdim=True)


def expected(logits: Tensor, targets: Tensor, shares: Tensor, temperature: float) -> Tensor:
    """By a dense distribution over the vocabulary."""
    wanted = torch.zeros_like(logits)
    for row in range(len(targets)):
        for token, share in zip(targets[row].tolist(), shares[row].tolist(), strict=True):
            wanted[row, token] += share
    return -(wanted * (logits / temperature).log_softmax(-1)).sum(-1).mean()


def compare(got: Tensor, want: Tensor, adapter: Adapter) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7)
    parameters = list(adapter.tensors().values())
    pairs = zip(
        torch.autograd.grad(3 * got, parameters),
        torch.autograd.grad(3 * want, parameters),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("plain", [True, False], ids=["plain head", "scaled head"])
def test_loss_and_gradients_equal_the_dense_ones(
    base, adapter, batch, temperature, plain, monkeypatch
) -> None:
    """Without a plain head, the model's own logits are taken."""
    if not plain:
        monkeypatch.setattr(base.config, "logit_scale", 0.5, raising=False)
    logits = dense(base, BATCHES[batch])
    targets, shares = some(len(logits), 4)
    got = soft_target_loss(base, BATCHES[batch], targets, shares, temperature)
    assert got.dtype == torch.float64
    compare(got, expected(logits, targets, shares, temperature), adapter)


@pytest.mark.parametrize("batch", BATCHES)
def test_a_scalar_is_everybodys_share(base, adapter, batch) -> None:
    logits = dense(base, BATCHES[batch])
    targets, _ = some(len(logits), 4)
    got = soft_target_loss(base, BATCHES[batch], targets, torch.tensor(0.25))
    compare(got, expected(logits, targets, torch.full(targets.shape, 0.25), 1.0), adapter)


@pytest.mark.parametrize("batch", BATCHES)
def test_with_labels_alone_it_is_the_language_model_loss(base, adapter, batch) -> None:
    chosen = BATCHES[batch]
    labels = chosen.ids[:, 1:].flatten()
    labels = labels if chosen.counted is None else labels[chosen.counted.flatten()]
    shared = soft_target_loss(base, chosen, labels[:, None], torch.ones(len(labels), 1))
    for got in (language_model_loss(base, *chosen), shared):
        compare(got, F.cross_entropy(dense(base, chosen), labels), adapter)


def test_a_trained_head_gets_its_gradient(base, adapter) -> None:
    head = base.get_output_embeddings().weight.requires_grad_()
    logits = dense(base, BATCHES["masked"])
    targets, shares = some(len(logits), 4)
    got = soft_target_loss(base, BATCHES["masked"], targets, shares, 2.0)
    want = expected(logits, targets, shares, 2.0)
    torch.testing.assert_close(
        torch.autograd.grad(got, head)[0], torch.autograd.grad(want, head)[0], rtol=0, atol=1e-6
    )


def test_without_gradient(base, adapter) -> None:
    logits = dense(base, BATCHES["all"])
    targets, shares = some(len(logits), 4)
    with torch.no_grad():
        got = soft_target_loss(base, BATCHES["all"], targets, shares)
    assert not got.requires_grad
    torch.testing.assert_close(got, expected(logits, targets, shares, 1.0), rtol=0, atol=1e-7)


def test_under_autocast_near_the_dense_loss(base, adapter) -> None:
    base.float()
    with autocast("bf16", "cpu"):
        logits = dense(base, BATCHES["masked"]).float()
        targets, shares = some(len(logits), 4)
        want = expected(logits, targets, shares, 2.0)
        got = soft_target_loss(base, BATCHES["masked"], targets, shares, 2.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    parameters = list(adapter.tensors().values())
    for a, b in zip(
        torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters), strict=True
    ):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("plain", [True, False], ids=["plain head", "scaled head"])
def test_logits_come_in_their_order(base, adapter, batch, plain, monkeypatch) -> None:
    if not plain:
        monkeypatch.setattr(base.config, "logit_scale", 0.5, raising=False)
    pieces = list(logits_in_pieces(base, BATCHES[batch]))
    assert (len(pieces) > 1) == (plain and batch == "all")
    assert all(len(piece) <= 5 for piece in pieces) or not plain
    assert not any(piece.requires_grad for piece in pieces)
    torch.testing.assert_close(torch.cat(pieces), dense(base, BATCHES[batch]), rtol=0, atol=1e-9)

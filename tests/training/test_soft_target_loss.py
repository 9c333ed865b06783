"""Cross-entropy to shares of several tokens, against log_softmax of all logits in float64."""

import pytest
import torch
from small_models import VOCABULARY
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from coterie.adapters import Adapter
from coterie.bases.precision import autocast
from coterie.losses.tokens import Batch, language_model_loss, logits_in_pieces, soft_target_loss


def batches() -> dict[str, Batch]:
    """Return all tokens of three samples, and the last tokens of two, one of which is padded."""
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
    """Return the logits of the counted tokens, (n, vocabulary), for each sample alone."""
    logits = []
    for row, ids in enumerate(batch.ids):
        length = 7 if batch.real is None else int(batch.real[row].sum())
        each = model(ids[None, :length]).logits[0]
        logits.append(each if batch.counted is None else each[batch.counted[row, :length]])
    return torch.cat(logits)


def some(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return targets, some of which occur twice in a row, and shares, some of which are 0."""
    chance = torch.Generator().manual_seed(2)
    targets = torch.randint(VOCABULARY, (n, k), generator=chance)
    targets[::2, -1] = targets[::2, 0]
    shares = torch.rand(n, k, generator=chance)
    shares[1, 1:] = 0
    return targets, shares / shares.sum(1, keepdim=True)


def expected(logits: Tensor, targets: Tensor, shares: Tensor, temperature: float = 1) -> Tensor:
    """Compute the loss from a dense distribution over the vocabulary."""
    wanted = torch.zeros_like(logits).scatter_add_(1, targets, shares.to(logits.dtype))
    return -(wanted * (logits / temperature).log_softmax(-1)).sum(-1).mean()


def compare(got: Tensor, want: Tensor, adapter: Adapter) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-7)
    parameters = list(adapter.tensors().values())
    grads = (torch.autograd.grad(3 * loss, parameters) for loss in (got, want))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


each_batch = pytest.mark.parametrize("batch", BATCHES)


@each_batch
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.usefixtures("plain")
def test_loss_and_gradients_equal_the_dense_ones(base, adapter, batch, temperature) -> None:
    logits = dense(base, BATCHES[batch])
    targets, shares = some(len(logits), 4)
    got = soft_target_loss(base, BATCHES[batch], targets, shares, temperature)
    assert got.dtype == torch.float64
    compare(got, expected(logits, targets, shares, temperature), adapter)
    with torch.no_grad():
        again = soft_target_loss(base, BATCHES[batch], targets, shares, temperature)
    assert not again.requires_grad
    torch.testing.assert_close(again, got, rtol=0, atol=1e-7)


@each_batch
def test_a_scalar_is_everybodys_share(base, adapter, batch) -> None:
    logits = dense(base, BATCHES[batch])
    targets, _ = some(len(logits), 4)
    got = soft_target_loss(base, BATCHES[batch], targets, torch.tensor(0.25))
    compare(got, expected(logits, targets, torch.full(targets.shape, 0.25)), adapter)


@each_batch
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
    grads = (torch.autograd.grad(loss, head) for loss in (got, want))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-6)


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
    grads = (torch.autograd.grad(loss, parameters) for loss in (got, want))
    for a, b in zip(*grads, strict=True):
        assert F.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.97


@each_batch
def test_logits_come_in_their_order(base, adapter, batch, plain) -> None:
    pieces = list(logits_in_pieces(base, BATCHES[batch]))
    assert (len(pieces) > 1) == (plain and batch == "all")
    assert all(len(piece) <= 5 for piece in pieces) or not plain
    assert not any(piece.requires_grad for piece in pieces)
    torch.testing.assert_close(torch.cat(pieces), dense(base, BATCHES[batch]), rtol=0, atol=1e-9)

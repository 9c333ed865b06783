"""Sums of low-rank products against dense matrices."""

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.methods.low_rank import LowRankSum, PaddedMean, product_norm


def products(count: int, rows: int = 12, columns: int = 20) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of ranks 1, 2, 3, 1, ...: B (rows, r) and A (r, columns)."""
    chance = torch.Generator().manual_seed(count)
    ranks = [1 + i % 3 for i in range(count)]
    return [
        (torch.randn(rows, r, generator=chance), torch.randn(r, columns, generator=chance))
        for r in ranks
    ]


def dense(pairs: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    return sum(B.double().numpy() @ A.double().numpy() for B, A in pairs)  # pyright: ignore


@pytest.mark.parametrize("count", [1, 3, 50], ids=["one", "as factors", "as the whole"])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_factors_are_the_truncated_svd_of_the_sum(count: int, shape: tuple[int, int]) -> None:
    pairs = products(count, *shape)
    total = LowRankSum()
    for B, A in pairs:
        total.add(B, A)
    U, S, Vt = np.linalg.svd(dense(pairs), full_matrices=False)
    most = min(12, sum(len(A) for _, A in pairs))
    for rank in range(1, most + 1):
        B, A = total.factors(rank)
        assert B.shape == (shape[0], rank)
        assert A.shape == (rank, shape[1])
        best = (U[:, :rank] * S[:rank]) @ Vt[:rank]
        np.testing.assert_allclose((B @ A).numpy(), best, rtol=0, atol=1e-12)
        np.testing.assert_allclose((A @ A.t()).numpy(), np.eye(rank), rtol=0, atol=1e-12)
    B, A = total.factors(most)
    np.testing.assert_allclose((B @ A).numpy(), dense(pairs), rtol=0, atol=1e-12)


def test_a_rank_beyond_the_matrix_is_filled_with_zeros() -> None:
    total = LowRankSum()
    (B, A), *_ = products(1, 12, 4)
    total.add(B, A)
    B, A = total.factors(9)
    assert B.shape == (12, 9)
    assert A.shape == (9, 4)
    np.testing.assert_allclose((B @ A).numpy(), dense(products(1, 12, 4)), rtol=0, atol=1e-12)


def test_memory_does_not_grow_with_the_number_of_products() -> None:
    def held(count: int) -> int:
        total = LowRankSum()
        for B, A in products(count):
            total.add(B, A)
        held = [*(total._factors or ()), *([] if total._sum is None else [total._sum])]
        return sum(tensor.numel() for tensor in held)

    assert held(2) < held(1000) == held(100) == 12 * 20


def test_the_norm_of_a_product() -> None:
    for B, A in products(3):
        expected = np.linalg.norm(dense([(B, A)]))
        assert product_norm(B, A) == pytest.approx(expected, rel=1e-12)
    assert product_norm(torch.zeros(5, 2), torch.randn(2, 7)) == 0


def test_pairs_of_different_ranks_are_padded_with_zeros() -> None:
    chance = torch.Generator().manual_seed(0)
    ranks, weights = [2, 5, 1, 3], [1.0, 0.5, 3.0, 2.0]
    shared = torch.randn(7, 6, generator=chance), torch.randn(6, 4, generator=chance)
    means, Bs = [*map(PaddedMean, shared)], torch.zeros(7, 5).double()
    As = torch.zeros(5, 4).double()
    for rank, weight in zip(ranks, weights, strict=True):
        B, A = torch.randn(7, rank, generator=chance), torch.randn(rank, 4, generator=chance)
        before = B.clone(), A.clone()
        means[0].add(B.double(), weight)
        means[1].add(A, weight**2)
        Bs[:, :rank] += weight / sum(weights) * B
        As[:rank] += weight**2 / sum(w**2 for w in weights) * A
        assert torch.equal(B, before[0])
        assert torch.equal(A, before[1])
    B, A = (mean.result() for mean in means)
    assert (B.dtype, A.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(B[:, :5].double(), Bs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(A[:5].double(), As, rtol=1e-6, atol=1e-7)
    assert torch.equal(B[:, 5:], shared[0][:, 5:])  # what nobody sent stays
    assert torch.equal(A[5:], shared[1][5:])
    assert torch.equal(means[0].result(), B)  # asking changes nothing


def test_the_first_client_of_the_largest_rank_keeps_its_adapter() -> None:
    mean = PaddedMean(torch.zeros(3, 2))
    B = torch.ones(3, 2).double()
    for _ in range(2):
        mean.add(B, 3.0)
    assert B.eq(1).all()
    assert mean.result().eq(1).all()

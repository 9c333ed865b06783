"""Sums of low-rank updates, and the best update of a given rank, without wide matrices."""

import torch
from torch import Tensor
from torch.nn import functional as F


class LowRankSum:
    """`sum_i B_i A_i` in float64, one product at a time, exactly.

    The factors stand side by side while they are smaller than the sum, a matrix (out, in); from
    then on the sum itself is kept. So memory is bounded, whatever the number of products.
    """

    def __init__(self) -> None:
        self._factors: tuple[Tensor, Tensor] | None = None
        self._whole: Tensor | None = None

    def add(self, B: Tensor, A: Tensor) -> None:
        """Add a product of B: (out, r) and A: (r, in), with any r."""
        B, A = B.double(), A.double()
        if self._whole is not None:
            self._whole.addmm_(B, A)
            return
        if self._factors is not None:
            B, A = torch.cat([self._factors[0], B], dim=1), torch.cat([self._factors[1], A])
        self._factors = B, A
        if B.numel() + A.numel() > len(B) * A.shape[1]:
            self._whole, self._factors = B @ A, None

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U: (out, k), S: (k,) descending and V^T: (k, in), whose product is the sum."""
        if self._whole is not None:
            return torch.linalg.svd(self._whole, full_matrices=False)
        assert self._factors is not None, "something was added"
        B, A = self._factors
        left, core = torch.linalg.qr(B)
        right, other = torch.linalg.qr(A.t())
        U, S, Vt = torch.linalg.svd(core @ other.t())
        return left @ U, S, Vt @ right.t()

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """B = U S: (out, rank) and A = V^T: (rank, in), the best approximation of that rank.

        Zeros fill up a rank larger than out or in.
        """
        U, S, Vt = self.svd()
        B, A = (U * S)[:, :rank], Vt[:rank]
        missing = rank - len(A)
        return F.pad(B, (0, missing)), F.pad(A, (0, 0, 0, missing))


def product_norm(B: Tensor, A: Tensor) -> float:
    """The Frobenius norm of B A, of (out, r) and (r, in), without the product."""
    B, A = B.double(), A.double()
    return torch.linalg.norm(B @ torch.linalg.qr(A.t()).R.t()).item()


class PaddedMean:
    """The weighted mean of factors B and A of different ranks, padded with zeros to the largest."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sums: list[Tensor] = []
        self._weights = [0.0, 0.0]
        self.largest = 0
        """The largest rank that came."""

    def add(self, B: Tensor, A: Tensor, weight_B: float, weight_A: float) -> None:
        """Count in B: (out, r) and A: (r, in), r of at most the largest rank."""
        missing = self._rank - len(A)
        padded = F.pad(B, (0, missing)), F.pad(A, (0, 0, 0, missing))
        if not self._sums:
            self._sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in padded]
        for i, weight in enumerate((weight_B, weight_A)):
            self._sums[i].add_(padded[i], alpha=weight)
            self._weights[i] += weight
        self.largest = max(self.largest, len(A))

    def result(self) -> tuple[Tensor, Tensor]:
        """B: (out, rank) and A: (rank, in), float32."""
        assert self._sums, "something was added"
        means = (total / w for total, w in zip(self._sums, self._weights, strict=True))
        B, A = (mean.to(torch.float32) for mean in means)
        return B, A

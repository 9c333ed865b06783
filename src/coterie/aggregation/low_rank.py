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
        self.weight = 0
        """What the products weigh together; whoever adds them counts it."""

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
    """The weighted mean of tensors of different sizes, each padded with zeros to the largest.

    Entries beyond the largest that came stay as they were `before`, a tensor of the largest size.
    """

    def __init__(self, before: Tensor) -> None:
        self._before = before
        self._sum = torch.zeros_like(before, dtype=torch.float64)
        self._weight = 0.0
        self._largest: tuple[int, ...] = (0,) * before.dim()

    def add(self, tensor: Tensor, weight: float) -> None:
        """Count a tensor in."""
        padded = torch.zeros_like(self._sum)
        padded[tuple(map(slice, tensor.shape))] = tensor
        self._sum.add_(padded, alpha=weight)
        self._weight += weight
        self._largest = tuple(map(max, self._largest, tensor.shape))

    def result(self) -> Tensor:
        """The mean, float32."""
        came, result = tuple(map(slice, self._largest)), self._before.clone()
        result[came] = (self._sum[came] / self._weight).to(torch.float32)
        return result

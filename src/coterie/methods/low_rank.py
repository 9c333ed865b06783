"""Sums of low-rank updates, and the best low-rank approximations of these sums."""

import torch
from torch import Tensor
from torch.nn import functional as F


class LowRankSum:
    """The exact sum `sum_i B_i A_i` in float64, accumulated one product at a time.

    At first, the concatenated factors B_i and A_i are stored. As soon as the factors have more
    elements in total than the sum, which is an (out, in) matrix, only the sum is stored. The
    required memory is therefore bounded for any number of products.
    """

    def __init__(self) -> None:
        self._factors: tuple[Tensor, Tensor] | None = None
        self._sum: Tensor | None = None
        self.weight = 0.0
        """The total weight of the products, which the caller of `add` must update."""

    def add(self, B: Tensor, A: Tensor) -> None:
        """Add the product of B (out, r) and A (r, in). Each call can have a different rank r."""
        B, A = B.double(), A.double()
        if self._sum is not None:
            self._sum.addmm_(B, A)
            return
        if self._factors is not None:
            B, A = torch.cat([self._factors[0], B], dim=1), torch.cat([self._factors[1], A])
        self._factors = B, A
        if B.numel() + A.numel() > len(B) * A.shape[1]:
            self._sum, self._factors = B @ A, None

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the singular value decomposition of the sum.

        Returns:
            The tensors U (out, k), S (k,) and V^T (k, in), where k is the number of singular
            values. The singular values in S are in descending order.
        """
        if self._sum is not None:
            return torch.linalg.svd(self._sum, full_matrices=False)
        assert self._factors is not None, "call add() first"
        B, A = self._factors
        Q_B, R_B = torch.linalg.qr(B)
        Q_A, R_A = torch.linalg.qr(A.t())
        U, S, Vt = torch.linalg.svd(R_B @ R_A.t())
        return Q_B @ U, S, Vt @ Q_A.t()

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Compute factors of a given rank whose product B A best approximates the sum.

        If the rank exceeds the number of singular values, the factors are padded with zeros.

        Returns:
            B (out, rank) and A (rank, in). B contains the first columns of U S, and A contains the
            first rows of V^T; see `svd`.
        """
        U, S, Vt = self.svd()
        B, A = (U * S)[:, :rank], Vt[:rank]
        missing = rank - len(A)
        return F.pad(B, (0, missing)), F.pad(A, (0, 0, 0, missing))


def product_norm(B: Tensor, A: Tensor) -> float:
    """Compute the Frobenius norm of the product of B (out, r) and A (r, in).

    The product itself, an (out, in) matrix, is not computed.
    """
    B, A = B.double(), A.double()
    return torch.linalg.norm(B @ torch.linalg.qr(A.t()).R.t()).item()


class PaddedMean:
    """The weighted mean of tensors that differ in size and are padded with zeros to equal sizes.

    Args:
        before: The previous value of the mean. In each dimension, it must be at least as large as
            any added tensor. Elements that no tensor covers keep their previous values.
    """

    def __init__(self, before: Tensor) -> None:
        self._before = before
        self._sum = torch.zeros_like(before, dtype=torch.float64)
        self._weight = 0.0
        self._largest: tuple[int, ...] = (0,) * before.dim()

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add a tensor to the mean."""
        padded = torch.zeros_like(self._sum)
        padded[tuple(map(slice, tensor.shape))] = tensor
        self._sum.add_(padded, alpha=weight)
        self._weight += weight
        self._largest = tuple(map(max, self._largest, tensor.shape))

    def result(self) -> Tensor:
        """Return the mean in float32."""
        covered, result = tuple(map(slice, self._largest)), self._before.clone()
        result[covered] = (self._sum[covered] / self._weight).to(torch.float32)
        return result

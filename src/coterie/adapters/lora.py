"""Low-rank adaptation (LoRA): a trained `g B A` is added to a linear layer's frozen weight W."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.dropout import dropout
from coterie.adapters.layout import Layout
from coterie.adapters.parameter import Parameter, trained_beside
from coterie.bases.sites import Linear, StandIn, sizes, working_dtype


class LoraPair(nn.Module):
    """The factors A (rank, in) and B (out, rank) of a low-rank product B A that adapts a module.

    `residual_A` and `residual_B` are either None, or the factors of a second product, which is
    added to B A. The second product may have any rank and is never trained. Both products have the
    same input, to which the same dropout mask is applied.

    Args:
        role: Role of the parameters.
        path: Path, in the base, of the module that the pair adapts.
        shape: The module's input width and output width, as a tuple (in, out).
        rank: Rank of the product B A. The second product may have another rank.
        near: A weight of the module; the pair is created on this weight's device.
        expert: Index of the expert to which the pair belongs; None if it belongs to no expert.
        freeze_A: Whether only B is trained.
    """

    residual_A: Tensor | None
    residual_B: Tensor | None

    def __init__(
        self,
        role: str,
        path: str,
        shape: tuple[int, int],
        rank: int,
        near: Tensor,
        expert: int | None = None,
        freeze_A: bool = False,
    ) -> None:
        super().__init__()
        self.role, self.path, self.expert, self.freeze_A = role, path, expert, freeze_A
        columns, rows = shape
        self.A = nn.Parameter(torch.zeros(rank, columns, **trained_beside(near)))
        self.B = nn.Parameter(torch.zeros(rows, rank, **trained_beside(near)))
        for name in ("residual_A", "residual_B"):  # buffers are moved and copied with the model
            self.register_buffer(name, None)

    @property
    def rank(self) -> int:
        """Total rank: the rank of B A, plus the rank of the second product if there is one."""
        return len(self.A) + (0 if self.residual_A is None else len(self.residual_A))

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """Return two factors of a given rank whose product is B A plus the residual.

        The residual is the product of `residual_B` and `residual_A`. If the pair has a residual,
        `residual_A` is appended to A, and `residual_B` is appended to B. The two factors are then
        padded with zeros to the given rank.

        Args:
            rank: Rank of the returned factors. It must not be less than the pair's total rank,
                `self.rank`.

        Returns:
            The extended A, shaped (rank, in), and the extended B, shaped (out, rank).
        """
        if rank == len(self.A):
            return self.A, self.B
        A, B = self.A, self.B
        if self.residual_A is not None and self.residual_B is not None:
            A, B = torch.cat([A, self.residual_A]), torch.cat([B, self.residual_B], dim=1)
        return F.pad(A, (0, 0, 0, rank - len(A))), F.pad(B, (0, rank - len(A)))

    def described(self) -> tuple[Parameter, Parameter]:
        """Return A and B as parameters, with their names and roles."""
        number = "" if self.expert is None else f".{self.expert}"
        name, at = f"{self.role}{number}/{self.path}", self.path
        A = Parameter(f"{name}.A", self.role, self.A, "kaiming", at, "A", self.expert)
        if self.freeze_A:
            A = replace(A, name=f"frozen/{A.name}", role="frozen")
        return A, Parameter(f"{name}.B", self.role, self.B, "zero", at, "B", self.expert)


def pairs_in(stand_in: StandIn) -> list[LoraPair]:
    """Return a stand-in's own low-rank pairs.

    A stand-in contains the module of the base that it replaces. If this module contains further
    stand-ins, the low-rank pairs of these further stand-ins are left out.
    """
    modules = stand_in.named_modules()
    return [m for name, m in modules if isinstance(m, LoraPair) and not name.startswith("base.")]


class LoraLinear(StandIn):
    """A linear layer with LoRA: `y = W x + b + g B A dropout(x)`."""

    def __init__(self, base: Linear, path: str, layout: Layout) -> None:
        super().__init__(base)
        rank, weight = layout.attention_rank, base.weight
        self.lora = LoraPair("dense", path, sizes(base), rank, weight, freeze_A=layout.freeze_A)
        self.gain = layout.gain(rank)
        self.dropout = layout.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        A, B = self.lora.factors(self.lora.rank)
        low = dropout(x.flatten(0, -2), self.dropout) @ A.to(x.dtype).t()
        update = torch.addmm(y.flatten(0, -2), low, B.to(x.dtype).t(), alpha=self.gain)
        return update.view_as(y)

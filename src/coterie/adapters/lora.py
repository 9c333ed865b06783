"""Low-rank adaptation: a frozen linear layer W plus `g B A`."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.dropout import dropout
from coterie.adapters.layout import Layout, Role
from coterie.adapters.part import Part
from coterie.bases.sites import StandIn, sizes, working_dtype


class LoraPair(nn.Module):
    """A: (rank, in) and B: (out, rank) of one linear layer, for one expert or for attention.

    `residual`, where there is one, is a pair (A, B) of any rank that is added and never trained; it
    reads what A reads, dropout included.
    """

    residual_A: Tensor | None
    residual_B: Tensor | None

    def __init__(self, shape: tuple[int, int], rank: int, beside: Tensor, freeze_A: bool) -> None:
        """shape: (in, out); the pair is where a weight `beside` it is, in float32 or float64."""
        super().__init__()
        self.freeze_A = freeze_A
        columns, rows = shape
        dtype = torch.float64 if beside.dtype == torch.float64 else torch.float32
        device = "cpu" if beside.is_meta else beside.device
        self.A = nn.Parameter(torch.zeros(rank, columns, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=device))
        for name in ("residual_A", "residual_B"):  # buffers: what moves or copies a model has them
            self.register_buffer(name, None)

    @property
    def residual(self) -> tuple[Tensor, Tensor] | None:
        """See the class."""
        A, B = self.residual_A, self.residual_B
        return None if A is None or B is None else (A, B)

    @residual.setter
    def residual(self, pair: tuple[Tensor, Tensor] | None) -> None:
        self.residual_A, self.residual_B = pair or (None, None)

    @classmethod
    def of(cls, linear: nn.Module, rank: int, freeze_A: bool = False) -> "LoraPair":
        """The pair of a linear layer."""
        weight = linear.weight
        assert isinstance(weight, Tensor)
        return cls(sizes(linear), rank, weight, freeze_A)

    @property
    def rank(self) -> int:
        """Rows of A, with the residual's."""
        return len(self.A) + (0 if self.residual is None else len(self.residual[0]))

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """A: (rank, in) and B: (out, rank), the residual beside what is trained, then zeros."""
        if rank == len(self.A):
            return self.A, self.B
        A, B = self.A, self.B
        if self.residual is not None:
            A, B = torch.cat([A, self.residual[0]]), torch.cat([B, self.residual[1]], dim=1)
        return F.pad(A, (0, 0, 0, rank - len(A))), F.pad(B, (0, rank - len(A)))

    def parts(self, prefix: str, role: Role, path: str, expert: int | None) -> Iterator[Part]:
        """Declare both matrices, as those of a pair at a path of the base."""
        if self.freeze_A:
            frozen = f"frozen/{prefix}.A"
            yield Part(frozen, "frozen", self.A, "kaiming", path, "A", expert)
        else:
            yield Part(f"{prefix}.A", role, self.A, "kaiming", path, "A", expert)
        yield Part(f"{prefix}.B", role, self.B, "zero", path, "B", expert)


class LoraLinear(StandIn):
    """A linear layer with a low-rank correction: `y = W x + b + g B A dropout(x)`."""

    def __init__(self, base: nn.Module, layout: Layout) -> None:
        super().__init__(base)
        self.lora = LoraPair.of(base, layout.attention_rank, layout.freeze_A)
        self.gain = layout.gain(layout.attention_rank)
        self.dropout = layout.dropout

    def pairs(self, path: str) -> Iterator[tuple[LoraPair, tuple[Part, Part]]]:
        """The pair, and its A and B as parts, for the layer at this path of the base."""
        A, B = self.lora.parts(f"dense/{path}", "dense", path, None)
        yield self.lora, (A, B)

    def parts(self, path: str) -> Iterator[Part]:
        """Declare the layer's trained parameters."""
        for _, parts in self.pairs(path):
            yield from parts

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) to (..., out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        A, B = self.lora.factors(self.lora.rank)
        low = dropout(x.flatten(0, -2), self.dropout) @ A.to(x.dtype).t()
        update = torch.addmm(y.flatten(0, -2), low, B.to(x.dtype).t(), alpha=self.gain)
        return update.view_as(y)

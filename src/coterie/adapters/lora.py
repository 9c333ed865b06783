"""Low-rank adaptation: a frozen linear layer W plus `g B A`, and how its values begin."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.adapters.layout import Layout, Role
from coterie.bases.sites import StandIn, sizes, working_dtype
from coterie.chance import generator


@dataclass(frozen=True)
class Part:
    """A trained parameter as the module that owns it declares it."""

    name: str
    role: Role
    start: Literal["kaiming", "zero", "normal"]
    parameter: nn.Parameter


def initialise(parts: Iterable[Part], seed: int, client: str, shared: Collection[Role]) -> None:
    """Draw the first values: A Kaiming uniform (a = sqrt 5), B zero, routers normal (0.02).

    Each tensor has a generator of its own, so neither the order nor the other tensors matter.
    Roles in `shared` and what is frozen begin equal for all clients; the others differ by the
    client's name.
    """
    for part in parts:
        common = part.role == "frozen" or part.role in shared
        purpose = ("init", part.name) if common else ("init", part.name, client)
        chance = generator(seed, *purpose)
        value = torch.zeros(part.parameter.shape)
        if part.start == "kaiming":
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=chance)
        elif part.start == "normal":
            nn.init.normal_(value, std=0.02, generator=chance)
        part.parameter.data.copy_(value)


class LoraPair(nn.Module):
    """A: (rank, in) and B: (out, rank) of one linear layer, for one expert or for attention.

    `residual`, where there is one, is a pair (A, B) of any rank that is added and never trained.
    """

    def __init__(self, linear: nn.Module, rank: int, freeze_A: bool = False) -> None:
        super().__init__()
        self.freeze_A = freeze_A
        weight = linear.weight
        assert isinstance(weight, Tensor)
        columns, rows = sizes(linear)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = "cpu" if weight.is_meta else weight.device
        self.A = nn.Parameter(torch.zeros(rank, columns, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=device))
        self.residual: tuple[Tensor, Tensor] | None = None

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

    def parts(self, prefix: str, role: Role) -> Iterator[Part]:
        """Declare both matrices."""
        if self.freeze_A:
            yield Part(f"frozen/{prefix}.A", "frozen", "kaiming", self.A)
        else:
            yield Part(f"{prefix}.A", role, "kaiming", self.A)
        yield Part(f"{prefix}.B", role, "zero", self.B)


class LoraLinear(StandIn):
    """A linear layer with a low-rank correction: `y = W x + b + g B A x`."""

    def __init__(self, base: nn.Module, layout: Layout) -> None:
        super().__init__(base)
        self.lora = LoraPair(base, layout.attention_rank, layout.freeze_A)
        self.gain = layout.gain(layout.attention_rank)

    def pairs(self, path: str) -> Iterator[tuple[str, Role, LoraPair]]:
        """Name, role and pair of the layer at this path of the base."""
        yield f"dense/{path}", "dense", self.lora

    def parts(self, path: str) -> Iterator[Part]:
        """Declare the layer's trained parameters."""
        for name, role, pair in self.pairs(path):
            yield from pair.parts(name, role)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) to (..., out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        A, B = self.lora.factors(self.lora.rank)
        low = x.flatten(0, -2) @ A.to(x.dtype).t()
        update = torch.addmm(y.flatten(0, -2), low, B.to(x.dtype).t(), alpha=self.gain)
        return update.view_as(y)

"""Low-rank adaptation: a frozen linear layer W plus `g B A`, and how its values begin."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.adapters.bases import StandIn, sizes, working_dtype
from coterie.adapters.layout import Role
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
    Roles in `shared` begin equal for all clients; the others differ by the client's name.
    """
    for part in parts:
        purpose = ("init", part.name) if part.role in shared else ("init", part.name, client)
        chance = generator(seed, *purpose)
        value = torch.zeros(part.parameter.shape)
        if part.start == "kaiming":
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=chance)
        elif part.start == "normal":
            nn.init.normal_(value, std=0.02, generator=chance)
        part.parameter.data.copy_(value)


class LoraPair(nn.Module):
    """A: (rank, in) and B: (out, rank) of one linear layer, for one expert or for attention."""

    def __init__(self, linear: nn.Module, rank: int) -> None:
        super().__init__()
        weight = linear.weight
        assert isinstance(weight, Tensor)
        columns, rows = sizes(linear)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = "cpu" if weight.is_meta else weight.device
        self.A = nn.Parameter(torch.zeros(rank, columns, dtype=dtype, device=device))
        self.B = nn.Parameter(torch.zeros(rows, rank, dtype=dtype, device=device))

    def parts(self, prefix: str, role: Role) -> Iterator[Part]:
        """Declare both matrices."""
        yield Part(f"{prefix}.A", role, "kaiming", self.A)
        yield Part(f"{prefix}.B", role, "zero", self.B)


class LoraLinear(StandIn):
    """A linear layer with a low-rank correction: `y = W x + b + g B A x`."""

    def __init__(self, base: nn.Module, rank: int, gain: float) -> None:
        super().__init__(base)
        self.lora = LoraPair(base, rank)
        self.gain = gain

    def parts(self, path: str) -> Iterator[Part]:
        """Declare the trained parameters of the layer at this path of the base."""
        return self.lora.parts(f"dense/{path}", "dense")

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) to (..., out)."""
        x = x.to(working_dtype(x))
        y = self.base(x)
        low = x.flatten(0, -2) @ self.lora.A.to(x.dtype).t()
        update = torch.addmm(y.flatten(0, -2), low, self.lora.B.to(x.dtype).t(), alpha=self.gain)
        return update.view_as(y)

"""The LoRA family: adapter x schedule x sharing x aggregation, each a choice made by data.

FedAvg, Local and the CoMiGS methods are a few lines over this file (averaging.py, comigs.py).
A client trains low-rank experts on every MLP and one low-rank pair on every attention linear;
the server averages those roles that the method shares.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from coterie.adapters import Adapter, Layout, Role
from coterie.errors import CoterieError
from coterie.methods.adapter import AdapterMethod
from coterie.methods.contract import ClientId, Setting

PerClient = int | dict[ClientId, int]
"""One number for all clients, or a number by client name, `others` standing for the rest."""


class LoraMethod(AdapterMethod):
    """What the methods of the family have in common; the defaults are CoMiGS's settings."""

    generalists: PerClient = Field(default=1, description="experts that are averaged over clients")
    specialists: PerClient = Field(default=0, description="experts that stay at home")
    rank: PerClient = Field(default=8, description="r of the experts")
    attention_rank: int = Field(default=8, ge=0, description="r of attention's pairs; 0: none")
    targets: str | None = Field(
        default=None,
        description="which linear layers have those pairs, if not attention's: a pattern of names",
    )
    alpha: float = Field(default=16.0, gt=0, description="LoRA's alpha")
    scale: Literal["sqrt", "rank"] = Field(
        default="sqrt", description="alpha / sqrt(r), or alpha / r"
    )
    top_k: int | None = Field(
        default=None, ge=1, description="experts per token; default min(2, experts)"
    )

    common: ClassVar[tuple[str, ...]] = ("rank", "attention_rank", "targets", "alpha", "scale")
    routed: ClassVar[bool] = False
    mixes_ranks: ClassVar[bool] = False
    """Whether clients with different ranks can share experts."""
    shares: ClassVar[tuple[Role, ...]] = ("dense", "generalist")

    def layout(self, client: ClientId) -> Layout:
        """What is attached to the base for a client; raises CoterieError if it cannot be."""
        return Layout(
            generalists=for_client(self.generalists, client, "number of experts"),
            specialists=for_client(self.specialists, client, "number of experts"),
            rank=for_client(self.rank, client, "rank"),
            attention_rank=self.attention_rank,
            targets=self.targets,
            alpha=self.alpha,
            scale=self.scale,
            routed=self.routed,
            top_k=self.top_k,
        )

    def adapter(self, base: nn.Module, seed: int, client: ClientId) -> Adapter:
        """What a client trains; the shared part is equal for all."""
        return Adapter(base, self.layout(client), seed, client, self.shares)

    def kinds(self, clients: tuple[ClientId, ...]) -> list[ClientId]:
        """One client for each layout, the largest rank first."""
        layouts = {self.layout(client): client for client in clients}
        return [layouts[layout] for layout in sorted(layouts, key=lambda layout: -layout.rank)]

    def check(self, setting: Setting) -> None:
        """Every client has a layout, and names given in mappings are those of clients."""
        clients = setting.clients
        for what in ("generalists", "specialists", "rank"):
            counts = getattr(self, what)
            for name in set(counts) - {*clients, "others"} if isinstance(counts, dict) else ():
                raise CoterieError(
                    f"The method's {what} setting names {name!r}, which is not a client "
                    f"(clients: {', '.join(clients)})."
                )
        ranks = {self.layout(client).rank for client in clients}
        if len(ranks) > 1 and "generalist" in self.shares and not self.mixes_ranks:
            raise CoterieError(
                f"The method {self.name!r} averages experts and needs the same rank for all "
                f"clients, not {', '.join(map(str, sorted(ranks)))}; give one rank, or take "
                "hetlora or flexlora."
            )


def for_client(counts: PerClient, client: ClientId, what: str) -> int:
    """The number that is meant for a client; CoterieError, which says what it is, without one."""
    count = counts if isinstance(counts, int) else counts.get(client, counts.get("others"))
    if count is None:
        raise CoterieError(
            f"The method gives no {what} for the client {client!r}; add its name or `others`."
        )
    if count < 0:
        raise CoterieError(f"The client {client!r} cannot have a {what} of {count}.")
    return count

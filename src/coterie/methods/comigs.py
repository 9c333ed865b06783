"""CoMiGS: a mixture of shared generalist and private specialist experts (arXiv 2409.13931).

Experts are trained on training text, and every `router_every` steps the routers for `router_steps`
steps on validation text (the paper's bi-level problem, equation 1, and algorithm 1). Generalists
and attention's pairs are averaged over clients; specialists and routers never leave.
"""

from typing import ClassVar, Literal

from pydantic import Field

from coterie.adapters import Adapter, Role
from coterie.methods.contract import ClientContext
from coterie.methods.exact import AveragingMethod
from coterie.methods.lora import PerClient
from coterie.training.schedule import Level, Penalty, learning_rate


class CoMiGS(AveragingMethod):
    """Any number of generalists and specialists per client (1G1S; 1GXS with a mapping)."""

    name: ClassVar[str] = "comigs-1g1s"
    paper: ClassVar[str] = "arXiv 2409.13931"
    summary: ClassVar[str] = "generalists and attention averaged; specialists and routers stay"
    routed: ClassVar[bool] = True
    routers_learn: ClassVar[Literal["validation", "train", "jointly"]] = "validation"
    """Which text the routers' phases see; or jointly: no phases, routers learn with the experts."""
    common: ClassVar[tuple[str, ...]] = (
        *AveragingMethod.common,
        "router_every",
        "router_steps",
        "router_learning_rate",
        "load_balance",
        "load_balance_weight",
    )

    generalists: PerClient = Field(default=1, description="experts that are averaged over clients")
    specialists: PerClient = Field(default=1, description="experts that stay at home")
    router_every: int = Field(default=30, ge=1, description="tau: steps between two router phases")
    router_steps: int = Field(default=10, ge=1, description="s: updates of the routers in a phase")
    router_learning_rate: float = Field(default=2e-3, gt=0, description="constant")
    load_balance: Literal["none", "uniform", "generalist"] = Field(
        default="generalist",
        description="penalty on the routers; generalist: half of the load to expert 0",
    )
    load_balance_weight: float = Field(
        default=0.01, ge=0, description="its weight in the routers' loss"
    )

    def levels(self, context: ClientContext, adapter: Adapter) -> list[Level]:
        """Experts on training text; the routers, in their turn, on fresh batches of their own."""
        if self.routers_learn == "jointly":
            return super().levels(context, adapter)
        return [
            Level(
                "experts",
                ("dense", "generalist", "specialist"),
                "train",
                learning_rate(context.training, context.rounds),
            ),
            Level(
                "routers",
                ("router",),
                self.routers_learn,
                lambda step: self.router_learning_rate,
                every=self.router_every,
                steps=self.router_steps,
                penalty=self.penalty(adapter),
            ),
        ]

    def penalty(self, adapter: Adapter) -> Penalty | None:
        """The load-balance loss."""
        form = self.load_balance
        # When every expert is chosen for every token the penalty is constant: skip it.
        if form == "none" or not adapter.balances:
            return None
        return lambda start: self.load_balance_weight * adapter.load_balance(form)


class CoMiGS2G(CoMiGS):
    """Two generalists: all experts are averaged, the routers alone are personal."""

    name: ClassVar[str] = "comigs-2g"
    summary: ClassVar[str] = "two generalists and attention averaged; routers stay"

    generalists: PerClient = 2
    specialists: PerClient = 0


class CoMiGS2S(CoMiGS):
    """Two specialists: the same bi-level training, alone."""

    name: ClassVar[str] = "comigs-2s"
    summary: ClassVar[str] = "two specialists; nothing travels"
    shares: ClassVar[tuple[Role, ...]] = ()

    generalists: PerClient = 0
    specialists: PerClient = 2

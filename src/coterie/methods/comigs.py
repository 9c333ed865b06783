"""CoMiGS: a mixture of shared generalist and private specialist experts (arXiv 2409.13931).

Experts are trained on training text, and every `router.every` steps the routers for `router.steps`
steps on validation text (the paper's bi-level problem, equation 1, and algorithm 1). Generalists
and attention's pairs are averaged over clients; specialists and routers never leave.

With it stand its ablations and the baselines nearest to it. Two choices make each of them: which
experts are shared (one, both, none), and how the routers are trained: with the experts, or in
phases of their own on fresh training batches ("-tr"), where CoMiGS has validation batches (tables
1 and 4).
"""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from coterie.adapters import Adapter, of_roles
from coterie.methods.adapter import AdapterClient, AdapterMethod
from coterie.methods.exact import SETTING
from coterie.methods.settings import (
    Attention,
    Experts,
    Generalists,
    Lora,
    Mlp,
    PhasedRouter,
    Router,
    Specialists,
)
from coterie.training.schedule import Level, Penalty, learning_rate

EXPERTS = of_roles("dense", "generalist", "specialist")
ROUTERS = of_roles("router")


class Mixture(AdapterMethod):
    """Experts on every MLP, weighed per token by a router that stays with its client."""

    paper: ClassVar[str] = "arXiv 2409.13931"
    routers_learn: ClassVar[Literal["validation", "train"]] = "validation"
    """Which text the routers' phases see, where they have any."""

    attention: Attention | None = Attention()
    lora: Lora = Lora()

    def levels(self, client: AdapterClient) -> list[Level]:
        """Experts on training text; the routers, in their turn, on fresh batches of their own."""
        router = self.part("router", Router)
        if not isinstance(router, PhasedRouter):
            return super().levels(client)
        rate = learning_rate(client.context.training, client.context.rounds)
        penalty = self.penalty(client)
        experts = Level("experts", EXPERTS, "train", rate, penalty=penalty)
        routers = Level(
            "routers",
            ROUTERS,
            self.routers_learn,
            lambda step: router.learning_rate,
            every=router.every,
            steps=router.steps,
            penalty=penalty,
        )
        if router.leftover_gradients:
            return [replace(experts, leaves=ROUTERS), replace(routers, leaves=EXPERTS)]
        return [experts, routers]

    def penalty(self, client: AdapterClient) -> Penalty | None:
        """The load-balance loss, which stands in both levels of the problem (equation 2)."""
        router, adapter = self.part("router", Router), client.adapter
        # When every expert is chosen for every token the penalty is constant: skip it.
        if router is None or (form := router.load_balance) == "none" or not adapter.balances:
            return None
        assert isinstance(adapter, Adapter), "it was made from a layout"
        return lambda: router.load_balance_weight * adapter.load_balance(form)


JOINT, PHASED = Router(), PhasedRouter()


def _row(mlp: Mlp, router: Router, summary: str) -> dict[str, Any]:
    """Return what a preset has; experts of which none is averaged leave nothing to send."""
    sent = {"shared_roles": ()} if isinstance(mlp, Specialists) else {"exact": SETTING}
    return {"summary": summary, "mlp": mlp, "router": router, **sent}


AVERAGED, TOGETHER = "and attention averaged", "router trained with the experts"
PRESETS = {
    # Clients may have other numbers of experts, each its own (1GXS).
    "comigs-1g1s": _row(
        Experts(), PHASED, f"generalists {AVERAGED}; specialists and routers personal"
    ),
    "comigs-2g": _row(Generalists(), PHASED, f"two generalists {AVERAGED}; routers personal"),
    "comigs-2s": _row(Specialists(), PHASED, "two specialists; nothing is sent"),
    "pfedmoe": _row(Experts(), JOINT, f"one expert {AVERAGED}; {TOGETHER}"),
    "fedavg-moe": _row(Generalists(), JOINT, f"two experts {AVERAGED}; {TOGETHER}"),
    "local-moe": _row(Specialists(), JOINT, f"two experts; {TOGETHER}; nothing is sent"),
}
"""Each mixture's experts, router and summary."""
PRESETS["pfedmoe"]["paper"] = "arXiv 2402.01350"
for name, like in (
    ("comigs-tr", "comigs-1g1s"),
    ("fedavg-moe-tr", "comigs-2g"),
    ("local-moe-tr", "comigs-2s"),
):
    trained = {"summary": f"as {like}, with routers trained on training text"}
    PRESETS[name] = {**PRESETS[like], **trained, "routers_learn": "train"}

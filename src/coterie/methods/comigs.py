"""CoMiGS: a mixture of shared generalist and private specialist experts (arXiv 2409.13931).

Experts are trained on training text. After every `router.every` steps, the routers are trained on
validation text for `router.steps` steps (the paper's bi-level problem, equation 1, and algorithm
1). Generalists and LoRA pairs on attention are averaged over clients; specialists and routers never
leave their client.

This file also has CoMiGS's ablations and closest baselines, which differ in two choices: which
experts are shared (one, both or none), and how the routers are trained: together with the experts,
in separate phases on validation batches (as in CoMiGS), or in separate phases on new training
batches (methods whose names end in "-tr"; the paper's tables 1 and 4).
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
    """A mixture of experts on every MLP, with a private router that computes routing weights."""

    paper: ClassVar[str] = "arXiv 2409.13931"
    routers_learn: ClassVar[Literal["validation", "train"]] = "validation"
    """The text on which routers are trained, if they are trained in separate phases."""

    attention: Attention | None = Attention()
    lora: Lora = Lora()

    def levels(self, client: AdapterClient) -> list[Level]:
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
        router, adapter = self.part("router", Router), client.adapter
        # Both levels of the problem have the load-balancing loss (equation 2). The loss is omitted
        # if every expert is chosen for every token, because it is constant then.
        if router is None or (form := router.load_balance) == "none" or not adapter.balances:
            return None
        assert isinstance(adapter, Adapter), "a Mixture's adapter is an Adapter"
        return lambda: router.load_balance_weight * adapter.load_balance(form)


JOINT, PHASED = Router(), PhasedRouter()


def _preset(mlp: Mlp, router: Router, summary: str) -> dict[str, Any]:
    """Return the class variables and default settings of a preset, a named variant of `Mixture`.

    If all experts are specialists, the clients share no parameters, so `shared_roles` is empty.
    Otherwise, the preset has the setting `exact`, which selects exact averages of LoRA products.
    """
    sharing = {"shared_roles": ()} if isinstance(mlp, Specialists) else {"exact": SETTING}
    return {"summary": summary, "mlp": mlp, "router": router, **sharing}


AVERAGED, TOGETHER = "and attention averaged", "router trained with the experts"
PRESETS = {
    # Clients may have different numbers of experts (the paper's 1GXS).
    "comigs-1g1s": _preset(
        Experts(), PHASED, f"generalists {AVERAGED}; specialists and routers private"
    ),
    "comigs-2g": _preset(Generalists(), PHASED, f"two generalists {AVERAGED}; routers private"),
    "comigs-2s": _preset(Specialists(), PHASED, "two specialists; nothing is sent"),
    "pfedmoe": _preset(Experts(), JOINT, f"one expert {AVERAGED}; {TOGETHER}"),
    "fedavg-moe": _preset(Generalists(), JOINT, f"two experts {AVERAGED}; {TOGETHER}"),
    "local-moe": _preset(Specialists(), JOINT, f"two experts; {TOGETHER}; nothing is sent"),
}
"""A mapping from each preset's name to the preset's class variables and default settings."""
PRESETS["pfedmoe"]["paper"] = "arXiv 2402.01350"
for name, original in (
    ("comigs-tr", "comigs-1g1s"),
    ("fedavg-moe-tr", "comigs-2g"),
    ("local-moe-tr", "comigs-2s"),
):
    summary = f"like {original}, with routers trained on training text"
    PRESETS[name] = {**PRESETS[original], "summary": summary, "routers_learn": "train"}

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

from typing import Any, ClassVar

from coterie.methods.adapter import AdapterMethod
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


class Mixture(AdapterMethod):
    """A mixture of experts on every MLP, with a private router that computes routing weights."""

    paper: ClassVar[str] = "arXiv 2409.13931"
    attention: Attention | None = Attention()
    lora: Lora = Lora()


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

"""CoMiGS: a mixture of shared generalist and private specialist experts (arXiv 2409.13931).

Experts are trained on training text, and every `router.every` steps the routers for `router.steps`
steps on validation text (the paper's bi-level problem, equation 1, and algorithm 1). Generalists
and attention's pairs are averaged over clients; specialists and routers never leave.

With it stand its ablations and the baselines nearest to it. Two choices make each of them: which
experts are shared (one, both, none), and how the routers are trained: with the experts, or in
phases of their own on fresh training batches ("-tr"), where CoMiGS has validation batches (tables
1 and 4).
"""

from typing import ClassVar, Literal

from coterie.adapters import Role
from coterie.methods.adapter import AdapterClient, AdapterMethod
from coterie.methods.exact import SETTING
from coterie.methods.settings import (
    Attention,
    Experts,
    Generalists,
    Lora,
    PhasedRouter,
    Router,
    Specialists,
)
from coterie.training.schedule import Level, Penalty, learning_rate

PAPER = "arXiv 2409.13931"


class MixtureMethod(AdapterMethod):
    """Experts on every MLP, weighed per token by a router that stays with its client."""

    routers_learn: ClassVar[Literal["validation", "train"]] = "validation"
    """Which text the routers' phases see, where they have any."""

    attention: Attention | None = Attention()
    lora: Lora = Lora()

    def levels(self, client: AdapterClient) -> list[Level]:
        """Experts on training text; the routers, in their turn, on fresh batches of their own."""
        router: Router = self.part("router")
        if not isinstance(router, PhasedRouter):
            return super().levels(client)
        rate = learning_rate(client.context.training, client.context.rounds)
        experts: tuple[Role, ...] = ("dense", "generalist", "specialist")
        routers: tuple[Role, ...] = ("router",)
        penalty, both = self.penalty(client), router.leftover_gradients
        return [
            Level(
                "experts",
                experts,
                "train",
                rate,
                penalty=penalty,
                leaves=routers if both else (),
            ),
            Level(
                "routers",
                routers,
                self.routers_learn,
                lambda step: router.learning_rate,
                every=router.every,
                steps=router.steps,
                penalty=penalty,
                leaves=experts if both else (),
            ),
        ]

    def penalty(self, client: AdapterClient) -> Penalty | None:
        """The load-balance loss, which stands in both levels of the problem (equation 2)."""
        router: Router = self.part("router")
        form, adapter = router.load_balance, client.adapter
        # When every expert is chosen for every token the penalty is constant: skip it.
        if form == "none" or not adapter.balances:
            return None
        return lambda: router.load_balance_weight * adapter.load_balance(form)


class CoMiGS(MixtureMethod):
    """Any number of generalists and specialists per client (1G1S; 1GXS with a mapping)."""

    name: ClassVar[str] = "comigs-1g1s"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "generalists and attention averaged; specialists and routers personal"

    mlp: Experts = Experts()
    router: PhasedRouter = PhasedRouter()
    exact: bool = SETTING


class CoMiGS2G(MixtureMethod):
    """Two generalists: all experts are averaged, the routers alone are personal."""

    name: ClassVar[str] = "comigs-2g"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "two generalists and attention averaged; routers personal"

    mlp: Generalists = Generalists()
    router: PhasedRouter = PhasedRouter()
    exact: bool = SETTING


class CoMiGS2S(MixtureMethod):
    """Two specialists: the same bi-level training, alone."""

    name: ClassVar[str] = "comigs-2s"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "two specialists; nothing is sent"
    shared_roles: ClassVar[tuple[Role, ...]] = ()

    mlp: Specialists = Specialists()
    router: PhasedRouter = PhasedRouter()


class PFedMoE(MixtureMethod):
    """One shared and one personal expert; experts and router are trained together."""

    name: ClassVar[str] = "pfedmoe"
    paper: ClassVar[str] = "arXiv 2402.01350"
    summary: ClassVar[str] = "one expert and attention averaged; router trained with the experts"

    mlp: Experts = Experts()
    router: Router = Router()
    exact: bool = SETTING


class FedAvgMoE(MixtureMethod):
    """Two shared experts; experts and router are trained together."""

    name: ClassVar[str] = "fedavg-moe"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "two experts and attention averaged; router trained with the experts"

    mlp: Generalists = Generalists()
    router: Router = Router()
    exact: bool = SETTING


class LocalMoE(MixtureMethod):
    """Two personal experts; experts and router are trained together."""

    name: ClassVar[str] = "local-moe"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "two experts; router trained with the experts; nothing is sent"
    shared_roles: ClassVar[tuple[Role, ...]] = ()

    mlp: Specialists = Specialists()
    router: Router = Router()


class CoMiGSTr(MixtureMethod):
    """CoMiGS-1G1S whose routers' phases see training text."""

    name: ClassVar[str] = "comigs-tr"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "as comigs-1g1s, with routers trained on training text"
    routers_learn: ClassVar[Literal["validation", "train"]] = "train"

    mlp: Experts = Experts()
    router: PhasedRouter = PhasedRouter()
    exact: bool = SETTING


class FedAvgMoETr(MixtureMethod):
    """CoMiGS-2G whose routers' phases see training text."""

    name: ClassVar[str] = "fedavg-moe-tr"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "as comigs-2g, with routers trained on training text"
    routers_learn: ClassVar[Literal["validation", "train"]] = "train"

    mlp: Generalists = Generalists()
    router: PhasedRouter = PhasedRouter()
    exact: bool = SETTING


class LocalMoETr(MixtureMethod):
    """CoMiGS-2S whose routers' phases see training text."""

    name: ClassVar[str] = "local-moe-tr"
    paper: ClassVar[str] = PAPER
    summary: ClassVar[str] = "as comigs-2s, with routers trained on training text"
    routers_learn: ClassVar[Literal["validation", "train"]] = "train"
    shared_roles: ClassVar[tuple[Role, ...]] = ()

    mlp: Specialists = Specialists()
    router: PhasedRouter = PhasedRouter()

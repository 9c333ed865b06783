"""Mixtures of experts without CoMiGS's two levels: its ablations and the baselines nearest to it.

Two choices make a mixture of two experts: which experts are shared (one, both, none), and how the
routers are trained: with the experts, or in phases of their own on fresh training batches ("-tr"),
where CoMiGS has validation batches (arXiv 2409.13931, tables 1 and 4). Routers always stay.
"""

from typing import ClassVar, Literal

from coterie.methods.comigs import CoMiGS, CoMiGS2G, CoMiGS2S

Routers = Literal["validation", "train", "jointly"]


class PFedMoE(CoMiGS):
    """One shared and one personal expert; experts and router are trained together."""

    name: ClassVar[str] = "pfedmoe"
    paper: ClassVar[str] = "arXiv 2402.01350"
    summary: ClassVar[str] = "one expert and attention averaged; router trained with the experts"
    routers_learn: ClassVar[Routers] = "jointly"


class FedAvgMoE(CoMiGS2G):
    """Two shared experts; experts and router are trained together."""

    name: ClassVar[str] = "fedavg-moe"
    summary: ClassVar[str] = "two experts and attention averaged; router trained with the experts"
    routers_learn: ClassVar[Routers] = "jointly"


class LocalMoE(CoMiGS2S):
    """Two personal experts; experts and router are trained together."""

    name: ClassVar[str] = "local-moe"
    summary: ClassVar[str] = "two experts, alone; router trained with the experts"
    routers_learn: ClassVar[Routers] = "jointly"


class CoMiGSTr(CoMiGS):
    """CoMiGS-1G1S whose routers' phases see training text."""

    name: ClassVar[str] = "comigs-tr"
    summary: ClassVar[str] = "as comigs-1g1s, but routers learn from training text"
    routers_learn: ClassVar[Routers] = "train"


class FedAvgMoETr(CoMiGS2G):
    """CoMiGS-2G whose routers' phases see training text."""

    name: ClassVar[str] = "fedavg-moe-tr"
    summary: ClassVar[str] = "as comigs-2g, but routers learn from training text"
    routers_learn: ClassVar[Routers] = "train"


class LocalMoETr(CoMiGS2S):
    """CoMiGS-2S whose routers' phases see training text."""

    name: ClassVar[str] = "local-moe-tr"
    summary: ClassVar[str] = "as comigs-2s, but routers learn from training text"
    routers_learn: ClassVar[Routers] = "train"

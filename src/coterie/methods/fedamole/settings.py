"""The settings of FedAMoLE: adapters, routing, and the assignment of experts."""

from typing import Literal, Self

from pydantic import Field, model_validator

from coterie.adapters import AmoleLayout
from coterie.bases.sites import QUERY_VALUE
from coterie.methods.fedamole.assignment import Bounds
from coterie.methods.settings import Attention, LoraAlpha, Settings, refuse_unused
from coterie.privacy.mechanisms import MOST_EPSILON


class Privacy(Settings):
    """Differential privacy of the samples from which a client's mean embeddings are computed.

    The guarantee does not cover the samples on which adapters are trained. No sample is used both
    for training and for embeddings.
    """

    epsilon: float = Field(gt=0, le=MOST_EPSILON)
    """privacy budget over all rounds, per sample of the embedding set"""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """probability with which the epsilon guarantee may fail"""
    clip: float = Field(default=1.0, gt=0)
    """maximum l2 norm of a sample's embeddings, concatenated over all layers"""


class Embeddings(Settings):
    """Mean embeddings of held-out training samples, by which experts choose clients."""

    share: float = Field(default=0.05, gt=0, lt=1)
    """fraction of the training samples held out for embeddings"""
    samples: int = Field(default=200, ge=1)
    """maximum number of samples from which embeddings are computed"""
    privacy: Privacy | None = None
    """differential privacy of the mean embeddings"""


class AmoleRouter(Settings):
    """Routing of tokens to the domain experts that a client holds."""

    kind: Literal["token", "vanilla"] = "token"
    """source of routing scores; token: the experts' embeddings; vanilla: a gate with one row per
    expert"""
    top_k: int = Field(default=2, ge=1)
    """domain experts per token (k)"""
    score_scale: Literal["rank", "dim"] = "rank"
    """divisor of a token router's scores; rank: sqrt(r); dim: square root of the layer's input
    width, as in the paper"""
    renormalise: bool = True
    """normalise each token's weights to sum to 1 (unlike the paper)"""
    load_balance_weight: float = Field(default=1e-3, ge=0)
    """weight of the load-balancing loss (beta)"""
    load: Literal["top_k", "first"] = "top_k"
    """tokens that count as an expert's load; top_k: all tokens routed to the expert; first: only
    tokens for which the expert has the highest score, as in the paper"""

    @model_validator(mode="after")
    def _acts(self) -> Self:
        if self.kind == "vanilla":
            refuse_unused(self, "kind: vanilla", "score_scale")
        if self.top_k == 1:  # one weight normalised to 1 has no gradient
            refuse_unused(self, "top_k: 1", "renormalise")
        return self


class FedAMoLESettings(Settings):
    """Settings of FedAMoLE.

    The defaults are from the paper (such as 30 domain experts for 10 clients), or from the code
    that the paper's authors released. papers/fedamole.md lists the exceptions.
    """

    attention: Attention = Attention(targets=QUERY_VALUE)
    lora: LoraAlpha = LoraAlpha()
    router: AmoleRouter = AmoleRouter()
    experts: int | None = Field(default=None, ge=1)
    """domain experts per layer (E); null: three per client"""
    clients_per_expert: int = Field(default=2, ge=1)
    """clients that each expert chooses (k_c)"""
    min_experts: int = Field(default=2, ge=0)
    """minimum number of domain experts per client and layer (k_e)"""
    max_experts: int = Field(default=8, ge=1)
    """maximum number of domain experts per client and layer (b)"""
    assignment: Literal["rsea", "homogeneous", "random", "random-once"] = "rsea"
    """assignment of experts to clients; rsea: experts choose clients (reverse selection);
    homogeneous: reverse selection with equally many experts for every client; random: a new random
    assignment in every round; random-once: one random assignment for all rounds"""
    shared_expert: bool = True
    """add one expert shared by all clients"""
    embeddings: Embeddings = Embeddings()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.router.kind == "vanilla" and self.chooses:
            raise ValueError(
                "a vanilla router has no embeddings by which experts could choose clients; set "
                "`assignment` to random or random-once"
            )
        if not self.chooses:
            refuse_unused(self, f"assignment: {self.assignment}", "embeddings")
        if self.assignment == "homogeneous":
            refuse_unused(self, "assignment: homogeneous", "min_experts", "max_experts")
        if self.experts is not None and self.router.top_k > self.experts:
            raise ValueError(
                f"router.top_k is {self.router.top_k}, but there are only {self.experts} "
                "experts; lower router.top_k"
            )
        return self

    @property
    def chooses(self) -> bool:
        """Whether experts choose clients by mean embeddings.

        False if the setting `assignment` is "random" or "random-once".
        """
        return self.assignment in ("rsea", "homogeneous")

    def count(self, clients: int) -> int:
        """Return the number E of domain experts per layer in a run with this number of clients."""
        return 3 * clients if self.experts is None else self.experts

    def layout(self, experts: int) -> AmoleLayout:
        """Return the layout of the adapter for a number of domain experts per layer (E)."""
        return AmoleLayout(
            experts=experts,
            rank=self.attention.rank,
            alpha=self.lora.alpha,
            dropout=self.lora.dropout,
            top_k=self.router.top_k,
            targets=self.attention.targets,
            shared=self.shared_expert,
            router=self.router.kind,
            score_scale=self.router.score_scale,
            renormalise=self.router.renormalise,
            load=self.router.load,
        )

    def bounds(self, experts: int, clients: int, *, relaxed: bool) -> Bounds:
        """Return the bounds that an assignment of experts to clients must meet.

        Args:
            experts: The number of domain experts per layer (E).
            clients: The number of clients to which experts are assigned (C).
            relaxed: Whether to change the settings' bounds, as `Bounds.relaxed` does, if no
                assignment to `clients` clients meets them. This is needed in rounds in which only
                some of the run's clients take part.

        Returns:
            The bounds on the number of clients per expert and on the number of experts per client.
        """
        bounds = Bounds(self.clients_per_expert, self.min_experts, self.max_experts)
        if relaxed:
            bounds = bounds.relaxed(experts, clients)
        homogeneous = self.assignment == "homogeneous"
        return bounds.homogeneous(experts, clients) if homogeneous else bounds

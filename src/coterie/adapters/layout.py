"""What is attached to a base for one client: how many experts, of which rank, how weighed."""

from dataclasses import dataclass
from typing import Literal

from coterie.errors import CoterieError

Role = (
    Literal["dense", "generalist", "specialist", "router", "frozen"]
    | Literal["shared", "domain", "projection"]
    | Literal["prompt", "weight"]
)
"""What a parameter belongs to: the LoRA on attention, an expert that is shared, an expert that
stays, the router, or none of them because it keeps its first value, which is the same for all
clients. In FedAMoLE: the expert that all clients hold, the experts that choose their clients, and
what routes between these. prompt: a soft prompt. weight: a difference from a weight of the base.
Methods choose by role what is trained, what travels and what is averaged."""


@dataclass(frozen=True)
class Layout:
    """The adapter of one client. Experts are ordered: generalists first, then specialists."""

    generalists: int = 1
    specialists: int = 1
    rank: int = 8
    """Rank of the experts' low-rank pairs."""
    placement: Literal["auto", "inside", "beside"] = "auto"
    """Whether experts stand on the linear layers inside MLPs, or beside blocks. auto: inside where
    a layer has an MLP of a known shape, else beside its block."""
    attention_rank: int = 8
    """Rank of the pair on each linear layer of attention; 0: none."""
    targets: str | None = None
    """Which linear layers have that pair, if not attention's: a regular expression for the last
    part of their path, such as `q_proj|v_proj`, or for what they do, such as `attention.q`."""
    alpha: float = 16.0
    scale: Literal["sqrt", "rank"] = "sqrt"
    """A low-rank product counts alpha/sqrt(rank) (rank-stabilised) or alpha/rank."""
    routed: bool = True
    """False: the experts are averaged with equal weights, and there is no router."""
    freeze_A: bool = False
    """Train B only: the A of every pair has the role `frozen`."""
    top_k: int | None = None
    """How many experts work on a token; None: two, or one where there is only one."""
    dropout: float = 0.0
    """Rate of dropout on what every pair's A reads, in training."""

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        if min(self.generalists, self.specialists, self.attention_rank) < 0 or self.rank < 1:
            raise CoterieError(
                "Numbers of experts and ranks must not be negative, and rank must not be zero."
            )
        if self.top_k is not None and not 1 <= self.top_k <= self.experts:
            raise CoterieError(
                f"top_k is {self.top_k}, but must be between 1 and {self.experts} for a client "
                f"with {self.experts} experts."
            )

    @property
    def experts(self) -> int:
        """How many experts stand in each MLP."""
        return self.generalists + self.specialists

    @property
    def slots(self) -> int:
        """How many experts work on each token (k of the papers' top-k; all where averaged)."""
        if not self.routed:
            return self.experts
        return min(2, self.experts) if self.top_k is None else self.top_k

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each expert, in their order."""
        return ("generalist",) * self.generalists + ("specialist",) * self.specialists

    def gain(self, rank: int) -> float:
        """The factor g of a low-rank product of this rank."""
        return self.alpha / (rank**0.5 if self.scale == "sqrt" else rank)

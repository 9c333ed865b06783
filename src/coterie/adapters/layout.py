"""The layout of a client's adapter: numbers of experts, ranks and routing."""

from dataclasses import dataclass
from typing import Literal

from coterie.errors import CoterieError


@dataclass(frozen=True)
class Layout:
    """The layout of a client's adapter.

    In every layer, the generalists (experts that are aggregated) precede the specialists (experts
    that stay private).
    """

    generalists: int = 1
    specialists: int = 1
    rank: int = 8
    """Rank of the experts' low-rank pairs."""
    placement: Literal["auto", "inside", "beside", "linear"] = "auto"
    """Position of the experts. inside: on the linear layers of an MLP. beside: in parallel to a
    block. auto: inside if the decoder layer has an MLP of a known shape, else beside a block.
    linear: on each linear layer that `targets` selects, with a separate router for each layer."""
    attention_rank: int = 8
    """Rank of LoRA on the linear layers of attention; 0 for no LoRA."""
    targets: str | None = None
    """Regular expression that selects the linear layers with LoRA, or with experts if `placement`
    is `linear`; None selects attention. The expression is compared with the last component of a
    layer's path (for example, `q_proj|v_proj`) and with the layer's place (for example,
    `attention.q`; see `place_of`)."""
    alpha: float = 16.0
    scale: Literal["sqrt", "rank"] = "sqrt"
    """Factor by which low-rank products are scaled. sqrt: alpha / sqrt(rank), as in rank-stabilised
    LoRA. rank: alpha / rank, as in LoRA."""
    routed: bool = True
    """Whether a router computes the experts' weights. If not, all experts have equal weights."""
    freeze_A: bool = False
    """Whether only B is trained; the A of every pair then has the role `frozen`."""
    top_k: int | None = None
    """Number of experts per token; None means two, or one if there is only one expert."""
    dropout: float = 0.0
    """Dropout rate that is applied to the input of every low-rank pair in training."""

    def __post_init__(self) -> None:
        """Raise CoterieError if a number is out of range."""
        if min(self.generalists, self.specialists, self.attention_rank) < 0 or self.rank < 1:
            raise CoterieError(
                "The numbers of experts and the rank of LoRA on attention must be at least 0, and "
                "the experts' rank must be at least 1."
            )
        if self.top_k is not None and not 1 <= self.top_k <= self.experts:
            raise CoterieError(
                f"top_k is {self.top_k}, but must be between 1 and {self.experts} for a client "
                f"with {self.experts} experts."
            )

    @property
    def experts(self) -> int:
        """Number of experts in each decoder layer."""
        return self.generalists + self.specialists

    @property
    def slots(self) -> int:
        """Number k of experts that process each token.

        Without a router, all experts process each token.
        """
        if not self.routed:
            return self.experts
        return min(2, self.experts) if self.top_k is None else self.top_k

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each expert in a layer: first all generalists, then all specialists."""
        return ("generalist",) * self.generalists + ("specialist",) * self.specialists

    def gain(self, rank: int) -> float:
        """Return the factor g by which low-rank products of a given rank are scaled."""
        return self.alpha / (rank**0.5 if self.scale == "sqrt" else rank)

"""How a server turns uploads into downloads."""

from coterie.aggregation.assignment import (
    Bounds,
    assign,
    assign_all,
    relevance,
    relevance_of_known,
)
from coterie.aggregation.low_rank import LowRankSum, PaddedMean, product_norm
from coterie.aggregation.mean import (
    TOKENS,
    Aggregation,
    AggregationSpec,
    Contribution,
    Rule,
    weighted_mean,
)

__all__ = [
    "TOKENS",
    "Aggregation",
    "AggregationSpec",
    "Bounds",
    "Contribution",
    "LowRankSum",
    "PaddedMean",
    "Rule",
    "assign",
    "assign_all",
    "product_norm",
    "relevance",
    "relevance_of_known",
    "weighted_mean",
]

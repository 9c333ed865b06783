"""How a server turns uploads into downloads."""

from coterie.aggregation.assignment import Bounds, assign, assign_all, relevance
from coterie.aggregation.low_rank import LowRankSum, product_norm
from coterie.aggregation.mean import RunningMean

__all__ = [
    "Bounds",
    "LowRankSum",
    "RunningMean",
    "assign",
    "assign_all",
    "product_norm",
    "relevance",
]

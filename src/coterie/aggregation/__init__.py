"""How a server turns uploads into downloads."""

from coterie.aggregation.low_rank import LowRankSum, product_norm
from coterie.aggregation.mean import RunningMean

__all__ = ["LowRankSum", "RunningMean", "product_norm"]

"""How a server turns uploads into downloads."""

from coterie.aggregation.mean import RunningMean

__all__ = ["RunningMean"]

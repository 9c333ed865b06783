"""Which rows of a table are no better than always giving the commonest answer."""

from collections.abc import Mapping, Sequence

from coterie.analysis.frame import Result, over_runs
from coterie.analysis.significance import Unpaired, differences
from coterie.evaluation.metrics import Metric

COMMONEST = "commonest answer"
"""The name of the row that always gives the commonest answer of the client's training data."""


def at_floor(
    rows: Mapping[str, Sequence[Result]], floor: Sequence[Result], metric: Metric
) -> list[str]:
    """Name the rows that are not better than the floor by more than chance.

    Where scores by sample are missing, a row must have the better figure.

    Args:
        rows: Results by row, one per seed.
        floor: The floor's results, one per seed; see `coterie.engines.floor`. Empty if the data
            have none.
        metric: What is compared; without a score of it, the floor is ignored.
    """
    if not has_floor(floor, metric):
        return []
    found = differences({**rows, COMMONEST: floor}, COMMONEST, metric)

    def above(name: str) -> bool:
        gap = found[name]
        if isinstance(gap, Unpaired):
            return metric.order(_figure(rows[name], metric) - _figure(floor, metric)) < 0
        return gap.significant and metric.order(gap.value) < 0

    return [name for name in rows if not above(name)]


def has_floor(floor: Sequence[Result], metric: Metric) -> bool:
    """Return whether there is a floor of this metric for every client."""
    found = [list(result[result["reports"]].values()) for result in floor]
    return bool(found) and all(s and all(metric.key in score for score in s) for s in found)


def _figure(results: Sequence[Result], metric: Metric) -> float:
    """Return the mean over clients, then over seeds."""
    return float(over_runs(results)[metric.key].groupby("run").mean().mean())

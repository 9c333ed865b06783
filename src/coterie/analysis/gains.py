"""Who gains from learning together: each client's model against the one that it trains alone."""

from collections.abc import Mapping

from coterie.analysis.frame import Result, of_clients, scores
from coterie.analysis.significance import Difference, differences
from coterie.analysis.tables import listed, shown_of
from coterie.evaluation.metrics import Metric

ALONE = "local"
"""The method with which clients learn nothing from each other."""


def gains(results: Mapping[str, Result], asked: str | None = None) -> str | None:
    """Who does better with the last method of a run than alone, who worse, and who the same.

    Results by method, one seed, as `RunFolder.outcome` has them; asked: as in `metric_of`. None
    where there is nothing to compare: no run of `local`, or no scores by window.
    """
    method, joint = list(results.items())[-1]
    if method == ALONE or ALONE not in results:
        return None
    alone, metric = results[ALONE], shown_of(results.values(), asked)
    better, worse, same = [], [], []
    for client in sorted(scores(joint).index):
        pair = {ALONE: [of_clients(alone, [client])], method: [of_clients(joint, [client])]}
        found = differences(pair, ALONE, metric)[method]
        if not isinstance(found, Difference):
            return None
        before = float(scores(alone)[metric.key][client])
        told = f"{client} ({_change(found.value, before, metric)})"
        kind = better if metric.order(found.value) < 0 else worse
        (kind if found.significant else same).append(told)
    lower, higher = ("higher", "lower") if metric.share else ("lower", "higher")
    parts = [
        f"{what} for {listed(names)}"
        for what, names in ((lower, better), (higher, worse), ("much the same", same))
        if names
    ]
    return (
        f"With {method} in place of {ALONE}, {metric.name} is {'; '.join(parts)}. (Differences are "
        "told apart from chance by the test texts of this one run, at 95 %.)"
    )


def _change(value: float, before: float, metric: Metric) -> str:
    """A difference as people say it: of a share in points, of perplexity in per cent of it."""
    if metric.share:
        return f"{metric.shown(value):+.1f} points"
    return f"{100 * value / before:+.1f} %"

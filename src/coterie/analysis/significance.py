"""Significance of differences between the rows of a table, by a paired bootstrap.

Both rows of a pair are scored on the same windows (or samples) of the same texts. Each draw (one
bootstrap resample) selects n of the n windows of every client's text with replacement, and selects
the same windows for both rows, and for all clients with the same text. The draw also selects m - 1
of the m seeds with replacement: m seeds would underestimate the variance of the mean over seeds by
the factor (m - 1) / m (McCarthy and Snowden, "The Bootstrap and Finite Population Sampling", 1985).
As in the tables, the statistic is the mean over clients, then over seeds. `scipy.stats.bootstrap`
cannot be used, because it resamples a single set of pairs, without clients or seeds.

With one seed, an interval does not include the variation between seeds. With two, three or five
seeds it does, but where windows vary much less than seeds, the interval contains the true
difference in only 50, 75 or 88 % of cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.analysis.frame import Result, mean_score, scores
from coterie.evaluation.metrics import Metric
from coterie.seeding import generator

Floats = NDArray[np.float64]
Items = Mapping[str, Mapping[str, Any]]
"""For each client, the scores of every window of the test text; see `ClientHost.keep_items`."""
DRAWS = 2000
"""The number of draws, that is, of bootstrap resamples."""
BLOCK = 100
"""The number of draws that are computed at once, which limits the memory for long texts."""
LEVEL = 0.95
"""The confidence level of intervals."""
COMMONEST = "commonest answer"
"""The name of the row that always gives the commonest answer of the client's training data."""


class Unpaired(Exception):
    """Raised if two rows of a comparison, such as two methods, cannot be compared by window.

    The message states the reason.
    """


@dataclass(frozen=True)
class Difference:
    """The difference between the mean scores of two rows of a comparison, and its significance.

    `value` is the observed difference, `low` and `high` are the limits of the 95 % confidence
    interval, and `p` is the two-sided p-value.
    """

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the confidence interval excludes 0."""
        return not self.low <= 0 <= self.high


def differences(
    rows: Mapping[str, Sequence[Result]], reference: str, metric: Metric
) -> dict[str, Difference | Unpaired]:
    """Compute the difference between the reference row and each other row.

    Args:
        rows: For each row, the results returned by `RunFolder.outcome`, one per seed.
        reference: The name of the row that is subtracted from the other rows.
        metric: The metric to compare.

    Returns:
        For each other row, the difference from the reference row, averaged over the seeds for which
        both rows have a result. If the two rows cannot be compared window by window, the value is
        an `Unpaired` exception that states the reason.
    """
    others = {name: results for name, results in rows.items() if name != reference}
    outcomes: dict[str, Difference | Unpaired] = {}
    draws_by_row: dict[str, list[Floats]] = {name: [] for name in others}
    for result in rows[reference]:
        pairs: dict[str, Items] = {}
        for name, results in others.items():
            match = next((r for r in results if r.get("seed") == result.get("seed")), None)
            if match is None:
                continue
            try:
                pairs[name] = _paired(match, result, metric)
            except Unpaired as reason:
                outcomes[name] = reason
        if pairs:
            draws = _draws(pairs, window_scores(result, metric), metric)
            for name, row in zip(pairs, draws, strict=True):
                draws_by_row[name].append(row)
    for name, by_seed in draws_by_row.items():
        if name not in outcomes:
            none = Unpaired("they have no seed in common")
            outcomes[name] = _difference(np.array(by_seed)) if by_seed else none
    return outcomes


def _difference(by_seed: Floats) -> Difference:
    """Compute the confidence interval and the p-value of a difference.

    Args:
        by_seed: Differences shaped (seeds, 1 + DRAWS). Column 0 contains the observed differences.
            Each other column contains the differences in one bootstrap resample of the windows.
    """
    count, draws = len(by_seed), by_seed[:, 1:]
    seeds = _generator("seeds").integers(count, size=(max(1, count - 1), DRAWS))
    means = np.take_along_axis(draws, seeds, axis=0).mean(0)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    tail = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1, 2 * (tail + 1) / (DRAWS + 1))
    return Difference(float(by_seed[:, 0].mean()), float(low), float(high), float(p))


def _draws(pairs: Mapping[str, Items], reference: Items, metric: Metric) -> Floats:
    """Compute the differences between rows and the reference row, for the runs of one seed.

    Args:
        pairs: For each row, the scores of every client and window. They are paired with the scores
            of the same client and window in `reference`.
        reference: The scores of every client and window in the reference row.
        metric: The metric to compare.

    Returns:
        Differences shaped (rows, 1 + DRAWS). Column 0 contains the observed differences. Each other
        column contains the differences in one bootstrap resample of the windows.
    """
    by_client = []
    for name, items in reference.items():
        all_items = [items, *(row[name] for row in pairs.values())]
        sums = np.stack([_sums(row, metric) for row in all_items])
        values = _value(_resampled(sums, items["of"]), metric)
        by_client.append(values[1:] - values[0])
    return np.mean(by_client, axis=0)


def _paired(result: Result, reference: Result, metric: Metric) -> Items:
    """Return a result's scores by window. Raise Unpaired if the reference has different windows."""
    items = window_scores(result, metric)
    if _texts(items) != _texts(window_scores(reference, metric)):
        raise Unpaired("they were scored on different clients, texts, tokens or windows")
    return items


def window_scores(result: Result, metric: Metric) -> Items:
    """Return a result's scores by window.

    Raises:
        Unpaired: if a client has no scores by window, or if the mean of these scores is not the
            client's score in the result.
    """
    items: Items = result.get("items", {}).get(result["reports"], {})
    checked: dict[str, Mapping[str, Any]] = {}
    for name, reported in scores(result)[metric.name].items():
        if name not in items:
            raise Unpaired(
                "deployed runs, and runs made with earlier versions of Coterie, contain no scores "
                "of single windows"
            )
        mean = _value(_sums(items[name], metric).sum(1, keepdims=True), metric)
        if not np.isclose(mean, reported, rtol=1e-6):
            raise Unpaired("the scores by window come from a different round than the result")
        checked[str(name)] = items[name]
    return checked


def _texts(items: Items) -> dict[str, str]:
    return {name: item["of"] for name, item in items.items()}


def _sums(items: Mapping[str, Any], metric: Metric) -> Floats:
    """Return the metric's numerator and denominator for each window, shaped (2, windows).

    Windows (or samples) without a score, such as samples without answer choices, are omitted.
    """
    return np.array(metric.sums(items), dtype=float)


def _value(sums: Floats, metric: Metric) -> Floats:
    """Compute the metric from sums over windows.

    Args:
        sums: For each of k sets of windows, the sum of the numerators and the sum of the
            denominators, shaped (..., 2, k).
        metric: The metric.

    Returns:
        The value of the metric for each set of windows, shaped (..., k).
    """
    return metric.value(sums[..., 0, :] / sums[..., 1, :])


def _resampled(sums: Floats, text: str) -> Floats:
    """Sum values over all windows, and over the windows of each bootstrap resample (draw).

    Args:
        sums: One value (a numerator or a denominator) for each of n windows, shaped (..., n).
        text: The hash of the test text to which the windows belong. The draws depend only on this
            hash, so that all rows, and all clients with the same text, are resampled identically.

    Returns:
        Sums shaped (..., 1 + DRAWS): first the sum over all windows, then the sums of the draws.
    """
    count, random = sums.shape[-1], _generator("windows", text)
    blocks = [sums.sum(-1, keepdims=True)]
    for _ in range(DRAWS // BLOCK):
        drawn = random.integers(count, size=(BLOCK, count)) + count * np.arange(BLOCK)[:, None]
        times = np.bincount(drawn.ravel(), minlength=BLOCK * count).reshape(BLOCK, count)
        blocks.append(sums @ times.T)
    return np.concatenate(blocks, axis=-1)


def _generator(*purpose: str) -> np.random.Generator:
    return np.random.default_rng(generator(0, "bootstrap", *purpose).initial_seed())


def at_floor(
    rows: Mapping[str, Sequence[Result]], floor: Sequence[Result], metric: Metric
) -> list[str]:
    """Return the names of the rows that are not significantly better than the floor.

    The floor is the score of always giving the commonest answer. If the scores of single samples
    are missing, significance is not tested. A row then counts as better if the row's mean is better
    than the floor's mean.

    Args:
        rows: For each row, the results, one per seed.
        floor: The floor's results, one per seed; see `coterie.engines.floor`. Empty if the data
            have no floor.
        metric: The metric to compare. If the floor has no score for this metric, no names are
            returned.
    """
    if not has_floor(floor, metric):
        return []
    outcomes = differences({**rows, COMMONEST: floor}, COMMONEST, metric)

    def is_better(name: str) -> bool:
        outcome = outcomes[name]
        if isinstance(outcome, Unpaired):
            difference = mean_score(rows[name], metric.name) - mean_score(floor, metric.name)
            return metric.order(difference) < 0
        return outcome.significant and metric.order(outcome.value) < 0

    return [name for name in rows if not is_better(name)]


def has_floor(floor: Sequence[Result], metric: Metric) -> bool:
    """Return whether the floor has a score of this metric for every client and seed."""
    by_seed = [list(result[result["reports"]].values()) for result in floor]
    return bool(by_seed) and all(s and all(metric.name in score for score in s) for s in by_seed)

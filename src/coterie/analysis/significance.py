"""Significance of differences between the rows of a table, by a paired bootstrap.

Both rows of a pair are scored on the same windows (or samples) of the same texts. Each draw
resamples the n windows of every client's text n times with replacement, identically for both rows.
It then resamples the n seeds n - 1 times: n draws would underestimate the variance of the mean over
seeds by the factor (n - 1) / n (McCarthy and Snowden, "The Bootstrap and Finite Population
Sampling", 1985). The statistic is the table's: the mean over clients, then over seeds.
`scipy.stats.bootstrap` cannot be used as it resamples a single set of pairs, without clients or
seeds.
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
"""Scores by window, by client; see `ClientPart.keep_items`."""
DRAWS = 2000
BLOCK = 100
"""Number of draws computed at once, which bounds the memory for long texts."""
LEVEL = 0.95
"""Confidence level of intervals."""
COMMONEST = "commonest answer"
"""The name of the row that always gives the commonest answer of the client's training data."""


class Unpaired(Exception):
    """An error for two rows that cannot be compared window by window; the message is the reason."""


@dataclass(frozen=True)
class Difference:
    """The difference between two rows' scores, with a 95 % interval and a two-sided p-value."""

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the interval excludes 0."""
        return not self.low <= 0 <= self.high


def differences(
    rows: Mapping[str, Sequence[Result]], reference: str, metric: Metric
) -> dict[str, Difference | Unpaired]:
    """Compute the difference between each other row and the reference row.

    Args:
        rows: results by row, one per seed, as from `RunFolder.outcome`.
        reference: the name of the row that is subtracted.
        metric: the metric to compare.

    Returns:
        By row, the difference over the seeds that both rows have, or Unpaired if the windows
        cannot be paired.
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
            draws = _draws(pairs, _items(result, metric), metric)
            for name, row in zip(pairs, draws, strict=True):
                draws_by_row[name].append(row)
    for name, by_seed in draws_by_row.items():
        if name not in outcomes:
            none = Unpaired("they have no seed in common")
            outcomes[name] = _difference(np.array(by_seed)) if by_seed else none
    return outcomes


def _difference(by_seed: Floats) -> Difference:
    """Compute the interval and the p-value of a difference.

    Args:
        by_seed: the difference for each seed, first as observed, then in each draw of windows,
            (seeds, 1 + DRAWS).
    """
    count, draws = len(by_seed), by_seed[:, 1:]
    seeds = _generator("seeds").integers(count, size=(max(1, count - 1), DRAWS))
    means = np.take_along_axis(draws, seeds, axis=0).mean(0)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    tail = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1, 2 * (tail + 1) / (DRAWS + 1))
    return Difference(float(by_seed[:, 0].mean()), float(low), float(high), float(p))


def _draws(pairs: Mapping[str, Items], reference: Items, metric: Metric) -> Floats:
    """Compute the differences of rows from the reference row, for runs with one seed.

    Returns:
        Differences as observed, then in each draw of windows, (rows, 1 + DRAWS).
    """
    by_client = []
    for name, items in reference.items():
        all_items = [items, *(row[name] for row in pairs.values())]
        sums = np.stack([_sums(row, metric) for row in all_items])
        values = _value(_resampled(sums, name, items["of"]), metric)
        by_client.append(values[1:] - values[0])
    return np.mean(by_client, axis=0)


def _paired(result: Result, reference: Result, metric: Metric) -> Items:
    """Return a result's scores by window; raise Unpaired if the reference has other windows."""
    items = _items(result, metric)
    if _texts(items) != _texts(_items(reference, metric)):
        raise Unpaired("they were scored on different clients, texts, tokens or windows")
    return items


def _items(result: Result, metric: Metric) -> Items:
    """Return a result's scores by window; raise Unpaired if their mean is not the result."""
    items: Items = result.get("items", {}).get(result["reports"], {})
    checked: dict[str, Mapping[str, Any]] = {}
    for name, reported in scores(result)[metric.name].items():
        if name not in items:
            raise Unpaired("runs of earlier versions and deployed runs keep no scores by window")
        mean = _value(_sums(items[name], metric).sum(1, keepdims=True), metric)
        if not np.isclose(mean, reported, rtol=1e-6):
            raise Unpaired("the scores by window are from another round than the result")
        checked[str(name)] = items[name]
    return checked


def _texts(items: Items) -> dict[str, str]:
    return {name: item["of"] for name, item in items.items()}


def _sums(items: Mapping[str, Any], metric: Metric) -> Floats:
    """Return each window's numerator and denominator of the metric, (2, windows).

    Samples without a score, such as samples without choices, are omitted.
    """
    return np.array(metric.sums(items), dtype=float)


def _value(sums: Floats, metric: Metric) -> Floats:
    """Compute the metric from sums over windows: (..., 2, k) to (..., k)."""
    return metric.value(sums[..., 0, :] / sums[..., 1, :])


def _resampled(sums: Floats, *text: str) -> Floats:
    """Sum over all windows, then over each draw of windows: (..., n) to (..., 1 + DRAWS).

    The draws depend only on the text, so that all rows are resampled identically.
    """
    count, random = sums.shape[-1], _generator("windows", *text)
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

    If scores by sample are missing, rows whose mean is better than the floor's are excluded.

    Args:
        rows: results by row, one per seed.
        floor: the floor's results, one per seed; see `coterie.engines.floor`. Empty if the data
            have no floor.
        metric: the metric to compare; a floor without a score for this metric is ignored.
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

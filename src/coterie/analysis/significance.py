"""Whether rows of a table differ by more than chance from each other, and from a floor.

This is a paired bootstrap. Both rows are scored on the same windows (or samples) of the same texts.
Each draw takes as many windows of each client's text as there are, with replacement, and the same
ones for both rows; then the seeds, of which it takes one less than there are: with as many, the
spread of a mean over few seeds would come out too small by (n - 1) / n (McCarthy and Snowden, "The
Bootstrap and Finite Population Sampling", 1985). The figure of a row is that of the table: the mean
over clients, then over seeds. `scipy.stats.bootstrap` draws one set of pairs and knows neither
clients nor seeds.
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
"""What each window scored, by client; see `ClientPart.keep_items`."""
DRAWS = 2000
BLOCK = 100
"""Draws at once, so that long texts do not fill the memory."""
LEVEL = 0.95
"""Of an interval: the share of draws that it holds."""
COMMONEST = "commonest answer"
"""The name of the row that always gives the commonest answer of the client's training data."""


class Unpaired(Exception):
    """Two rows that cannot be compared window by window; the message says why."""


@dataclass(frozen=True)
class Difference:
    """A row's figure less another row's, with an interval of 95 % and a two-sided p-value."""

    value: float
    low: float
    high: float
    p: float

    @property
    def significant(self) -> bool:
        """Whether the interval leaves 0 out."""
        return not self.low <= 0 <= self.high


def differences(
    rows: Mapping[str, Sequence[Result]], reference: str, metric: Metric
) -> dict[str, Difference | Unpaired]:
    """How much each other row has more than the reference, over the seeds that both have.

    Results as `RunFolder.outcome` has them; Unpaired where windows cannot be paired.
    """
    others = {name: results for name, results in rows.items() if name != reference}
    found: dict[str, Difference | Unpaired] = {}
    drawn: dict[str, list[Floats]] = {name: [] for name in others}
    for result in rows[reference]:
        pairs: dict[str, Items] = {}
        for name, results in others.items():
            same = next((r for r in results if r.get("seed") == result.get("seed")), None)
            if same is None:
                continue
            try:
                pairs[name] = _paired(same, result, metric)
            except Unpaired as why:
                found[name] = why
        if pairs:
            draws = _drawn(pairs, _items(result, metric), metric)
            for name, one in zip(pairs, draws, strict=True):
                drawn[name].append(one)
    for name, by_seed in drawn.items():
        if name not in found:
            none = Unpaired("they have no seed in common")
            found[name] = _difference(np.array(by_seed)) if by_seed else none
    return found


def _difference(drawn: Floats) -> Difference:
    """Of a difference by seed, as it is and in each draw of windows: (seeds, 1 + DRAWS)."""
    count, draws = len(drawn), drawn[:, 1:]
    seeds = _chance("seeds").integers(count, size=(max(1, count - 1), DRAWS))
    found = np.take_along_axis(draws, seeds, axis=0).mean(0)
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    rarer = min((found <= 0).sum(), (found >= 0).sum())
    p = min(1, 2 * (rarer + 1) / (DRAWS + 1))
    return Difference(float(drawn[:, 0].mean()), float(low), float(high), float(p))


def _drawn(pairs: Mapping[str, Items], reference: Items, metric: Metric) -> Floats:
    """The differences of some rows' runs from the reference's, all of one seed.

    As they are, then in each draw of windows: (rows, 1 + DRAWS).
    """
    found = []
    for name, own in reference.items():
        every = [own, *(items[name] for items in pairs.values())]
        sums = np.stack([_sums(items, metric) for items in every])
        figures = _figure(_resampled(sums, name, own["of"]), metric)
        found.append(figures[1:] - figures[0])
    return np.mean(found, axis=0)


def _paired(one: Result, other: Result, metric: Metric) -> Items:
    """What each window of a run scored; raises Unpaired if another's windows are not the same."""
    mine, theirs = _items(one, metric), _items(other, metric)
    if _texts(mine) != _texts(theirs):
        raise Unpaired("they were scored on different clients, texts, tokens or windows")
    return mine


def _items(result: Result, metric: Metric) -> Items:
    """What each window scored, by client; raises Unpaired where that is not what was reported."""
    kept: Items = result.get("items", {}).get(result["reports"], {})
    found: dict[str, Mapping[str, Any]] = {}
    for name, reported in scores(result)[metric.name].items():
        if name not in kept:
            raise Unpaired("runs of earlier versions and deployed runs keep no scores by window")
        whole = _figure(_sums(kept[name], metric).sum(1, keepdims=True), metric)
        if not np.isclose(whole, reported, rtol=1e-6):
            raise Unpaired("the scores by window are of another round than the result")
        found[str(name)] = kept[name]
    return found


def _texts(items: Items) -> dict[str, str]:
    return {name: kept["of"] for name, kept in items.items()}


def _sums(items: Mapping[str, Any], metric: Metric) -> Floats:
    """By window, what is added up and what it is divided by: (2, n). Samples without a figure, such
    as those without choices, are left out."""
    return np.array(metric.sums(items), dtype=float)


def _figure(sums: Floats, metric: Metric) -> Floats:
    """The metric, of sums over windows: (..., 2, k) to (..., k)."""
    return metric.value(sums[..., 0, :] / sums[..., 1, :])


def _resampled(sums: Floats, *text: str) -> Floats:
    """Sums over all windows, then over each draw of them: (..., n) to (..., 1 + DRAWS).

    The draws are the same wherever the same text is scored.
    """
    count, chance = sums.shape[-1], _chance("windows", *text)
    found = [sums.sum(-1, keepdims=True)]
    for _ in range(DRAWS // BLOCK):
        drawn = chance.integers(count, size=(BLOCK, count)) + count * np.arange(BLOCK)[:, None]
        times = np.bincount(drawn.ravel(), minlength=BLOCK * count).reshape(BLOCK, count)
        found.append(sums @ times.T)
    return np.concatenate(found, axis=-1)


def _chance(*purpose: str) -> np.random.Generator:
    return np.random.default_rng(generator(0, "bootstrap", *purpose).initial_seed())


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
            more = mean_score(rows[name], metric.name) - mean_score(floor, metric.name)
            return metric.order(more) < 0
        return gap.significant and metric.order(gap.value) < 0

    return [name for name in rows if not above(name)]


def has_floor(floor: Sequence[Result], metric: Metric) -> bool:
    """Return whether there is a floor of this metric for every client."""
    found = [list(result[result["reports"]].values()) for result in floor]
    return bool(found) and all(s and all(metric.name in score for score in s) for s in found)

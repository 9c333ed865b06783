"""Metrics: what is measured of a model, which way is better, and how it is written.

A metric is one file. The package's own are in the files beside this one; others come from plugins.
They are imported when they are asked for by name, and need no torch to be described.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, TypeVar

from coterie.data.measured import Measured, Needs
from coterie.errors import CoterieError
from coterie.registry import Registry, check_named

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 1e9
"""From here on, a cell has the power of ten."""


class Metric:
    """One of the numbers in a score. A subclass defines the class variables and `score`."""

    name: ClassVar[str]
    """In run files and in scores, as result.json holds them."""
    title: ClassVar[str]
    """The name in tables and plots."""
    needs: ClassVar[Needs] = "nothing"
    """What the metric is computed from."""
    higher: ClassVar[bool] = True
    """Whether higher values are better."""
    share: ClassVar[bool] = True
    """Whether values are from 0 to 1, which tables and plots show in per cent."""
    digits: ClassVar[int] = 2
    """Decimals in tables."""
    logarithmic: ClassVar[bool] = False
    """Whether plots have a logarithmic axis."""

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each item, or None for an item that has none.

        The metric of a text is the mean over the items that have a score.
        """
        raise NotImplementedError

    def sums(self, items: Mapping[str, Sequence[float | None]]) -> Sequence[Sequence[float]]:
        """Return what is added up over items, and what the sum is divided by, for a bootstrap.

        Args:
            items: The scores of each item, by name, as a run folder keeps them.
        """
        values = [value for value in items[self.name] if value is not None]
        return [values, [1] * len(values)]

    def value(self, means: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Return the metric of texts, given their sums divided as `sums` says."""
        return means

    @property
    def label(self) -> str:
        """The title with its unit, for an axis."""
        return f"{self.title} (%)" if self.share else self.title

    @property
    def better(self) -> str:
        """A sentence for a caption."""
        return "Higher is better." if self.higher else "Lower is better."

    def shown(self, value: float) -> float:
        """Return a value in the unit of tables and plots: shares in per cent."""
        return 100 * value if self.share else value

    def cell(self, value: float) -> str:
        """Return a cell of a table: 12.34, 83.06 for a share of 0.8306, or 1e+304."""
        shown = self.shown(value)
        return f"{shown:.{self.digits}f}" if shown < LONGEST else f"{shown:.3g}"

    def order(self, value: float) -> float:
        """Return a key by which the best value is sorted first, and the worst last."""
        return -value if self.higher else value


_CLASSES = {
    "perplexity": "Perplexity",
    "accuracy": "Accuracy",
    "exact_match": "ExactMatch",
    "rouge_l": "RougeL",
    "reward_accuracy": "RewardAccuracy",
}
"""The class of each of the package's own metrics, in the file of the metric's name."""
HEADLINES = ("accuracy", "reward_accuracy", "rouge_l", "perplexity")
"""The metrics that are shown unless another is asked for: the first that all scores have."""
OF_SCORES = (
    *("loss", "bits_per_byte", "tokens", "bytes", "nats", "of"),
    *("samples", "pairs", "dpo_loss", "reward_margin"),
)
"""The other entries of scores, whose names no metric can have."""
K = TypeVar("K", bound=type)


def register(kind: K) -> K:
    """Give a metric's class its name in run files, for as long as this process runs.

    Raises:
        CoterieError: The class is no metric with a name and a title, or the name is taken.
    """
    if not issubclass(kind, Metric):
        raise CoterieError(f"{kind!r} is not a metric; it must be a subclass of coterie.Metric.")
    check_named(kind, METRICS.noun, "title", ", which tables and plots show")
    METRICS.add(kind.name, kind)
    return kind


def _builtin(name: str) -> type[Metric]:
    return getattr(import_module(f"coterie.evaluation.{name}"), _CLASSES[name])


METRICS: Registry[type[Metric]] = Registry(
    noun="metric",
    builtin={name: lambda name=name: _builtin(name) for name in _CLASSES},
    group="coterie.metrics",
    accept=register,
    reserved=OF_SCORES,
    advice=f"The metrics are {', '.join(_CLASSES)}; --plugin FILE.py, or coterie.register, adds "
    "your own.",
)


@cache
def instance(kind: type[Metric]) -> Metric:
    """Return the one object of a metric's class."""
    return kind()


def metric_named(name: str) -> Metric:
    """Return the metric of a name; raise CoterieError if there is none."""
    return instance(METRICS.get(name))


def metric_of(scores: Iterable[Mapping[str, float]], asked: str | None = None) -> Metric:
    """Return the metric to show: the one asked for, or the one that suits the scores.

    It is one that all scores have. Without any score it is the one asked for, or perplexity.
    """
    found = list(scores)
    if not found:
        return metric_named(asked or "perplexity")
    names = (*([asked] if asked else ()), *HEADLINES)
    everybody = (n for n in names if n == "perplexity" or all(n in score for score in found))
    return metric_named(next(everybody))

"""Metrics: how a model is scored, whether higher is better, and how values are formatted.

A metric is a class in a file of its own. Built-in metrics are in this package. Other metrics are in
plugins. A built-in metric is imported when its name is first looked up. This module does not import
torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from coterie.data.measured import Measured, Needs
from coterie.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 1e9
"""The smallest value that tables show in scientific notation."""


class Metric:
    """A score of a model on a split: a mean over the split's items, or a function of this mean.

    A subclass defines `name`, `title` and `score`, and overrides any other class variable whose
    default does not fit. The subclass is registered with `coterie.register` or loaded with
    `--plugin FILE.py`. A metric that is not a mean of scores also overrides `sums` and `value`.
    The following metric, for example, is the mean length of the generated answers::

        class AnswerLength(Metric):
            name = "answer_length"
            title = "answer length (characters)"
            needs = "answers"
            share = False  # not a fraction to be shown in per cent

            def score(self, measured):
                return [len(text) for text in measured.texts]
    """

    name: ClassVar[str]
    """The metric's name in run files (`evaluation.metric`) and in result.json."""
    title: ClassVar[str]
    """The metric's name in tables and plots."""
    needs: ClassVar[Needs] = "nothing"
    """The input that the metric needs in addition to the losses of the items.

    The value "answers" stands for generated answers, "choices" for the losses of all answers to
    choose from, and "pairs" for preferences. The metric is computed only on splits that provide
    this input.
    """
    higher: ClassVar[bool] = True
    """Whether higher values are better."""
    share: ClassVar[bool] = True
    """Whether values are shares from 0 to 1. Tables and plots show shares in per cent."""
    digits: ClassVar[int] = 2
    """The number of decimals in tables."""
    logarithmic: ClassVar[bool] = False
    """Whether plots have a logarithmic axis."""

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each item of a split.

        The value of the metric on the split is the mean over the items that have a score.

        Args:
            measured: The model's losses on n items (windows, samples or pairs), and the input named
                by the attribute `needs`.

        Returns:
            The scores of the n items. The score of an item that cannot be scored, such as a sample
            without choices, is None.
        """
        raise NotImplementedError

    def sums(self, items: Mapping[str, Sequence[float | None]]) -> Sequence[Sequence[float]]:
        """Return the items' numerators and denominators, from which the metric is computed.

        The metric's mean is the sum of the numerators, divided by the sum of the denominators. A
        bootstrap resamples the items and computes both sums again.

        Args:
            items: A mapping of names to lists with one value per item, as stored in the run folder.
                The lists of scores have the names of the metrics, the list of losses has the name
                `nats`, and the list of the numbers of tokens has the name `tokens`.

        Returns:
            Two sequences of equal length: the numerators, and the denominators. By default, the
            numerators are the scores that are not None, and every denominator is 1.
        """
        values = [value for value in items[self.name] if value is not None]
        return [values, [1] * len(values)]

    def value(self, means: "NDArray[np.float64]") -> "NDArray[np.float64]":
        """Convert means to values of the metric.

        Args:
            means: An array of any shape. Each mean is a sum of the numerators that `sums` returns,
                divided by a sum of the denominators.

        Returns:
            The values, in the shape of `means`. By default, the values are the means. The values of
            perplexity are the exponentials of the means.
        """
        return means

    @property
    def label(self) -> str:
        """The title with the unit, for the axis of a plot."""
        return f"{self.title} (%)" if self.share else self.title

    @property
    def better(self) -> str:
        """A sentence for captions: "Higher is better." or "Lower is better."."""
        return "Higher is better." if self.higher else "Lower is better."

    def shown(self, value: float) -> float:
        """Convert a value to the unit of tables and plots.

        Args:
            value: A value of the metric.

        Returns:
            The value in per cent if the metric is a share, or else the unchanged value.
        """
        return 100 * value if self.share else value

    def cell(self, value: float) -> str:
        """Format a value for a table.

        Args:
            value: A value of the metric.

        Returns:
            A text such as "12.34" or "1e+304". For a share of 0.8306, the text is "83.06".
        """
        shown = self.shown(value)
        return f"{shown:.{self.digits}f}" if shown < LONGEST else f"{shown:.3g}"

    def order(self, value: float) -> float:
        """Return a sort key that places the best value first.

        Args:
            value: A value of the metric.

        Returns:
            The negated value if higher values are better, or else the unchanged value.
        """
        return -value if self.higher else value


_CLASSES = {
    "perplexity": "Perplexity",
    "accuracy": "Accuracy",
    "exact_match": "ExactMatch",
    "rouge_l": "RougeL",
    "reward_accuracy": "RewardAccuracy",
}
"""The class of each built-in metric. The class's module has the same name as the metric."""
HEADLINES = ("accuracy", "reward_accuracy", "rouge_l", "perplexity")
"""The metrics to show by default, in order of preference; see `metric_of`."""
OF_SCORES = (
    *("loss", "bits_per_byte", "tokens", "bytes", "nats", "of"),
    *("samples", "pairs", "dpo_loss", "reward_margin"),
)
"""The names of entries of scores that are not metrics. A metric cannot have one of these names."""
METRICS: Registry[type[Metric]] = Registry(
    noun="metric",
    builtin={
        name: partial(resolve_name, f"coterie.evaluation.{name}:{kind}")
        for name, kind in _CLASSES.items()
    },
    group="coterie.metrics",
    base="coterie.evaluation.metrics:Metric",
    requires={"title": ", the metric's name in tables and plots"},
    reserved=OF_SCORES,
    advice=f" The metrics are {', '.join(_CLASSES)}.",
)


@cache
def instance(kind: type[Metric]) -> Metric:
    """Return the only instance of a metric's class."""
    return kind()


def metric_named(name: str) -> Metric:
    """Return the metric with a given name, or raise CoterieError if no metric has this name."""
    return instance(METRICS.get(name))


def metric_of(scores: Iterable[Mapping[str, float]], asked: str | None = None) -> Metric:
    """Return the metric to show for some scores.

    Args:
        scores: The scores, each a mapping of metric names to values.
        asked: The name of the preferred metric, if any.

    Returns:
        The metric `asked`, if all scores contain this metric. Otherwise, the first metric of
        `HEADLINES` that all scores contain, or perplexity if there is no such metric. If `scores`
        is empty, the result is the metric `asked`, or perplexity if `asked` is None.
    """
    all_scores = list(scores)
    if not all_scores:
        return metric_named(asked or "perplexity")
    names = (*([asked] if asked else ()), *HEADLINES)
    common = (n for n in names if n == "perplexity" or all(n in score for score in all_scores))
    return metric_named(next(common))

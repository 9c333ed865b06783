"""The metrics that models are scored by: what people call them, which way is better, how written.

Of a text there is perplexity; of prompts with answers, and of preferences, there may be others
beside it, all of them shares from 0 to 1, which are written in per cent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LONGEST = 1e9
"""From here on, a cell has the power of ten."""


@dataclass(frozen=True)
class Metric:
    """One of the numbers in a score."""

    key: str
    """In scores, as result.json holds them."""
    name: str
    share: bool = True
    """Whether it is a share from 0 to 1, of which higher is better; else lower is."""

    @property
    def label(self) -> str:
        """For a title or an axis: the name, with its unit."""
        return f"{self.name} (%)" if self.share else self.name

    @property
    def better(self) -> str:
        """For a caption."""
        return "Higher is better." if self.share else "Lower is better."

    def shown(self, value: float) -> float:
        """In the unit that tables and plots have: shares in per cent."""
        return 100 * value if self.share else value

    def cell(self, value: float) -> str:
        """A cell of a table: 12.34, 83.06 for a share of 0.8306, or 1e+304 after divergence."""
        shown = self.shown(value)
        return f"{shown:.2f}" if shown < LONGEST else f"{shown:.3g}"

    def order(self, value: float) -> float:
        """What the best comes first by, and the worst last."""
        return -value if self.share else value


PERPLEXITY = Metric("perplexity", "perplexity", share=False)
ACCURACY = Metric("accuracy", "accuracy")
REWARD_ACCURACY = Metric("reward_accuracy", "reward accuracy")
ROUGE_L = Metric("rouge_l", "ROUGE-L")
METRICS = {
    metric.key: metric
    for metric in (
        PERPLEXITY,
        ACCURACY,
        REWARD_ACCURACY,
        ROUGE_L,
        Metric("exact_match", "exact match"),
    )
}


def metric_of(scores: Iterable[Mapping[str, float]], asked: str | None = None) -> Metric:
    """What to show of scores: what was asked for, or what suits them, where all of them have it.

    Accuracy suits best, of answers or of rewards, then ROUGE-L, else perplexity, which every score
    has. Without any score it is what was asked for, or perplexity.
    """
    found = list(scores)
    if not found:
        return METRICS[asked or PERPLEXITY.key]
    wanted = [METRICS[asked]] if asked else []
    choices = (*wanted, ACCURACY, REWARD_ACCURACY, ROUGE_L, PERPLEXITY)
    return next(m for m in choices if m is PERPLEXITY or all(m.key in score for score in found))

"""The settings of FedMKT, and the class variables in which its presets differ."""

from typing import ClassVar, Literal

from pydantic import Field

from coterie.methods.adapter import AdapterMethod
from coterie.methods.settings import Attention, Lora


class FedMKTSettings(AdapterMethod):
    """Settings of FedMKT.

    The defaults are from the paper, or from the code that the paper's authors released, except for
    `own` and `align`. papers/fedmkt.md lists the differences.
    """

    teaches: ClassVar[bool] = True
    """Whether clients teach the server."""
    per_round: ClassVar[int] = 1
    """The number of exchanges per round."""

    attention: Attention = Attention()
    lora: Lora = Lora(scale="rank")
    task_weight: float = Field(default=0.9, ge=0, le=1)
    """weight of the label loss (lambda); the distillation loss has the weight 1 - lambda"""
    logits: int = Field(default=128, ge=1)
    """number of most likely tokens sent per position (k)"""
    temperature: float = Field(default=1.0, gt=0)
    """temperature of the teachers' distributions"""
    epochs: int = Field(default=1, ge=1)
    """passes over the public set per round"""
    own: Literal["none", "labels", "self", "mean"] = "labels"
    """distillation target of samples for which no teacher has a lower loss than the student; none:
    no target, as in the paper (the distillation loss is a mean over the batch's samples with such a
    teacher); labels: the answer; self: the student's own predictions; mean: the student's own
    predictions, and for samples with such a teacher, the mean of the student's and the teacher's
    predictions, weighted by exp(-loss)"""
    align: Literal["offsets", "warping"] = "offsets"
    """alignment of two tokenizers' positions; offsets: by the number of the answer's characters
    before a position; warping: by the paper's dynamic programme over edit distances"""

    def averages(self, exchange: int) -> bool:
        """Return whether clients upload adapters, and the server averages them, in an exchange.

        The next download then contains the mean of the adapters. If there are two exchanges per
        round (`per_round`), clients upload adapters in the second exchange of every round. If there
        is one exchange per round, clients never upload adapters.

        Args:
            exchange: The number of the exchange, counted from 0. The number -1 stands for the time
                before the first exchange. With -1, the result is whether the first download
                contains an initial adapter that the clients use.

        Returns:
            True if clients upload adapters. Otherwise, clients upload predictions or, if the
            server learns nothing (`teaches` is false), an empty message.
        """
        return exchange % self.per_round == 1

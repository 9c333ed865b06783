"""The settings of FedMKT, and what its presets differ in."""

from typing import ClassVar, Literal

from pydantic import Field

from coterie.methods.adapter import AdapterMethod
from coterie.methods.settings import Attention, Lora


class FedMKTSettings(AdapterMethod):
    """Settings of FedMKT; defaults are the paper's, but for `own`."""

    teaches: ClassVar[bool] = True
    """Whether clients teach the server."""
    per_round: ClassVar[int] = 1
    """Exchanges that make a round."""

    attention: Attention = Attention()
    lora: Lora = Lora(scale="rank")
    task_weight: float = Field(default=0.9, ge=0, le=1)
    """weight of the label loss (lambda); the rest is distillation"""
    logits: int = Field(default=128, ge=1)
    """most likely tokens sent per position (k)"""
    temperature: float = Field(default=1.0, gt=0)
    """temperature of the teachers' distributions"""
    epochs: int = Field(default=1, ge=1)
    """passes over the public set per round"""
    own: Literal["none", "labels", "self", "mean"] = "labels"
    """target of distillation where no teacher is better: none (the paper's form: its mean is over
    the other samples of a batch), labels, or the model's own predictions (self); mean: as self, and
    elsewhere a mean of own and teacher's predictions weighted by exp(-loss)"""
    align: Literal["offsets", "warping"] = "offsets"
    """match positions that have read the same characters, or by the paper's dynamic programme over
    edit distances"""

    def averages(self, exchange: int) -> bool:
        """Whether an exchange (0 is the first) ends with the mean of adapters; else predictions
        are exchanged. The first download, as if after exchange -1, has adapters, too."""
        return exchange % self.per_round == 1

"""When a client updates which of its parameters, on which text: schedules as data.

A schedule is a list of levels. Joint training is one level; CoMiGS's bi-level problem
(arXiv 2409.13931, equation 1) is two: experts on training text, routers on validation text.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.adapters import Role
from coterie.training.spec import TrainingSpec

Penalty = Callable[[], Tensor]
"""A scalar that is added to the loss, computed after the adapter's forward pass."""


@dataclass(frozen=True)
class Level:
    """Parameters that are updated together, with an optimiser of their own."""

    name: str
    roles: tuple[Role, ...]
    split: Literal["train", "validation"]
    learning_rate: Callable[[int], float]
    """From the run's step count, so that a late joiner is in step."""
    every: int = 1
    """Its turn comes after every so many steps of the run."""
    steps: int = 1
    """Updates in a turn."""
    penalty: Penalty | None = None


def learning_rate(training: TrainingSpec, rounds: int) -> Callable[[int], float]:
    """Learning rate at a step of the run: half a cosine over all of its steps, or, with
    `learning_rate_decay`, smaller by that factor from round to round."""
    first, last = training.learning_rate, training.final_learning_rate
    decay = training.learning_rate_decay
    total = rounds * training.steps

    def at(step: int) -> float:
        if decay is not None:
            return first * decay ** (step // training.steps)
        done = min(step / total, 1.0)
        return last + (first - last) * (1 + math.cos(math.pi * done)) / 2

    return at

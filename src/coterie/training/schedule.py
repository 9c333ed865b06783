"""When a client updates which of its parameters, on which text: schedules as data.

A schedule is a list of levels. Joint training is one level. CoMiGS's bi-level problem
(arXiv 2409.13931, equation 1) is two: experts on training text, routers on validation text. A
method that alternates has one level for each group of parameters, in exchanges of its own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.adapters import Selects
from coterie.training.spec import TrainingSpec

Penalty = Callable[[], Tensor]
"""A scalar that is added to the loss, computed after the adapter's forward pass."""


@dataclass(frozen=True)
class Level:
    """Parameters that are updated together, with an optimiser of their own."""

    name: str
    """A name that no other level of the client has; batches are drawn with it."""
    selects: Selects
    """Whether the level updates a parameter."""
    split: Literal["train", "validation"]
    """The text that the level learns from."""
    learning_rate: Callable[[int], float]
    """The learning rate at a step of the run, so that clients that join late agree with others."""
    every: int = 1
    """Number of steps of the run between two turns of the level."""
    steps: int = 1
    """Number of updates in a turn."""
    penalty: Penalty | None = None
    leaves: Selects = lambda _: False
    """Whether the level's backward passes leave gradients on a parameter of another level, for that
    level's next update."""
    exchanges: Callable[[int], bool] = lambda _: True
    """Whether the level has turns in an exchange (the first is 0)."""

    def turns(self, exchanges: int, steps: int) -> int:
        """Return the number of turns in the first exchanges of a run, of this many steps each."""
        return sum(
            (number + 1) * steps // self.every - number * steps // self.every
            for number in range(exchanges)
            if self.exchanges(number)
        )


def learning_rate(training: TrainingSpec, rounds: int) -> Callable[[int], float]:
    """Learning rate at a step of the run, on a schedule over all of its steps; or, with `restart`,
    over those of each round.

    cosine: half a cosine down. one-cycle: a cosine up and half a cosine down (torch's
    `OneCycleLR`). Both have the final rate at the last step, even if the warm-up fills the
    schedule; a schedule of a single step has the peak rate. constant: as after the warm-up; with
    `learning_rate_decay` smaller by that factor from round to round.
    """
    course, steps, first = training.course, training.steps, training.learning_rate
    cycle = course == "one-cycle"
    last, decay = training.final_learning_rate, training.learning_rate_decay
    total = steps if training.restart else rounds * steps
    end = total - 1
    top = training.warmup * total - 1 if cycle else math.ceil(training.warmup * total)
    start = training.initial_learning_rate
    if start is None:
        start = first / 25 if cycle else 0.0

    def at(step: int) -> float:
        peak = first if decay is None else first * decay ** (step // steps)
        step = step % steps if training.restart else step
        if total == 1:
            return peak
        if course != "constant" and step >= end:
            return last
        if step < top:
            rise = (1 - math.cos(math.pi * step / top)) / 2 if cycle else step / top
            return start + (peak - start) * rise
        if course == "constant":
            return peak
        done = (step - top) / (end - top)
        return last + (peak - last) * (1 + math.cos(math.pi * done)) / 2

    return at


def learning_rate_beside(
    training: TrainingSpec, rounds: int, round: int, updates: int
) -> Callable[[int], float]:
    """Learning rate at each of some updates that a round has beside its local steps.

    With `restart` the schedule runs over them, too. Otherwise all have the rate of the round's
    first step, without a warm-up: the run's schedule does not count them.
    """
    if training.restart:
        own = learning_rate(training.model_copy(update={"steps": updates}), rounds)
        return lambda update: own(round * updates + update)
    rate = learning_rate(training.model_copy(update={"warmup": 0.0}), rounds)
    return lambda update: rate(round * training.steps)

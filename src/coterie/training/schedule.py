"""Schedules as data: which parameters a client updates, when, and on which text.

A schedule is a list of levels. Joint training has one level. CoMiGS's bi-level problem
(arXiv 2409.13931, equation 1) has two: experts on training text, routers on validation text. A
method that trains groups of parameters in turn has one level for each group; each level is active
in some local trainings only.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from coterie.adapters import Selects
from coterie.training.spec import TrainingSpec

Penalty = Callable[[], Tensor]
"""Function that returns a scalar to add to the loss; called after the adapter's forward pass."""
Pull = Callable[[], tuple[float, Mapping[str, Tensor]]]
"""Function that returns the strength of a pull, and the targets of the pulled parameters by name.

After each step of the optimiser with learning rate eta, a parameter x with the target t becomes
`x - eta strength (x - t)`. The term is decoupled from the gradient, as AdamW decouples weight
decay. In the loss, where it would be `strength / 2 ||x - t||^2`, an optimiser that divides by the
gradients' size, such as AdamW, would change its strength. Here, x is the value after the step. If
`eta strength` exceeds 1, then x becomes t, because a larger factor would move x beyond t.
"""


@dataclass(frozen=True)
class Level:
    """Parameters that are updated together, with their own optimiser.

    The level has one turn per `every` steps of the run. A turn consists of `steps` updates.
    """

    name: str
    """A name that is unique among the client's levels; the seed of the batches depends on it."""
    selects: Selects
    """Function that returns whether the level updates a given parameter."""
    split: Literal["train", "validation"]
    """The text that the level trains on."""
    learning_rate: Callable[[int], float]
    """Function that returns the learning rate at a step, counted from the start of the run."""
    every: int = 1
    """The number of steps from one turn of the level to the next."""
    steps: int = 1
    """The number of updates in a turn."""
    penalty: Penalty | None = None
    pull: Pull | None = None
    leaves: Selects = lambda _: False
    """Function that returns whether this level only accumulates the gradient of a given parameter.

    Another level updates the parameter, and uses the accumulated gradient in its next update.
    """
    active: Callable[[int], bool] = lambda _: True
    """Function that returns whether the level has turns in a local training (the first is 0)."""

    def turns(self, trained: int, steps: int) -> int:
        """Return the number of turns that the level has in the first local trainings of a run.

        Args:
            trained: The number of local trainings, from the start of the run.
            steps: The number of steps in each local training.
        """
        return sum(
            (number + 1) * steps // self.every - number * steps // self.every
            for number in range(trained)
            if self.active(number)
        )


def learning_rate(training: TrainingSpec, rounds: int) -> Callable[[int], float]:
    """Return the learning rate schedule of a run, as a function of the step.

    Steps are counted from 0. The schedule spans all steps of the run. With the setting `restart`,
    the schedule spans the steps of one round, and starts again in every round. During the warm-up,
    the learning rate rises to its peak. The setting `schedule` determines how the learning rate
    changes during and after the warm-up:

    - cosine: a linear warm-up, then half a cosine from the peak to the final learning rate;
    - one-cycle: half a cosine for the warm-up, and half a cosine from the peak to the final
      learning rate, as in torch's `OneCycleLR`;
    - constant: a linear warm-up, then the peak, which is multiplied by `learning_rate_decay` after
      every round.

    With cosine and one-cycle, the last step has the final learning rate, even if the warm-up is as
    long as the schedule. The only exception is a schedule that consists of a single step: this step
    has the peak learning rate.
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
        progress = (step - top) / (end - top)
        return last + (peak - last) * (1 + math.cos(math.pi * progress)) / 2

    return at


def learning_rate_beside(
    training: TrainingSpec, rounds: int, round: int, updates: int
) -> Callable[[int], float]:
    """Return the learning rate schedule for a round's updates that are not local training steps.

    Distillation, for example, makes such updates. With the setting `restart`, these updates have a
    separate schedule, which spans the updates of the round. Without `restart`, all of these updates
    have the same learning rate. It is the learning rate of the round's first local training step,
    computed as if the run's schedule had no warm-up.

    Args:
        training: The settings of the run.
        rounds: The number of rounds in the run.
        round: The round, counted from 0.
        updates: The number of updates in the round that are not local training steps.

    Returns:
        A function that returns the learning rate of an update. Its argument is the number of the
        update in the round, counted from 0.
    """
    if training.restart:
        restarted = learning_rate(training.model_copy(update={"steps": updates}), rounds)
        return lambda update: restarted(round * updates + update)
    rate = learning_rate(training.model_copy(update={"warmup": 0.0}), rounds)
    return lambda update: rate(round * training.steps)

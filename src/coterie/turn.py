"""The numbers that count what a run does."""

from dataclasses import dataclass

TRAIN = "train"
"""The phase of an exchange in which clients train."""


@dataclass(frozen=True)
class Turn:
    """The place in a run of one download to and one upload from each client.

    A round of the run file consists of one or more exchanges of the method; most methods need one.
    An exchange consists of one turn for each of its phases: training, and the phases that
    transforms add before or after training. All numbers begin with 0. `RunConfig.turn` makes the
    turns of a run.
    """

    round: int
    """The number of the round of the run file."""
    exchange: int
    """The number of the exchange, counted from the start of the run."""
    number: int
    """The number of the turn, counted from the start of the run. Checkpoints and orders to the
    clients of a deployment have these numbers."""
    phase: str = TRAIN
    """The phase of the exchange."""
    first: bool = True
    """Whether the exchange is the first one of its round."""
    last: bool = True
    """Whether the exchange is the last one of its round."""
    after: bool = False
    """Whether the phase comes after training, so that the uploads of the training wait."""
    closes: bool = True
    """Whether the turn is the last one of its exchange, so that the server aggregates."""

    @property
    def ends_round(self) -> bool:
        """Whether the turn is the last one of its round."""
        return self.last and self.closes


FIRST = Turn(0, 0, 0)
"""The first turn of a run whose rounds have one exchange, without phases of transforms."""

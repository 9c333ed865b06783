"""What a run will cost a client, found by a step of it on this machine."""

import resource
import sys
import time
from dataclasses import dataclass

from coterie.analysis.message_sizes import first_exchange, start
from coterie.config.run import RunConfig
from coterie.engines.session import Session


@dataclass(frozen=True)
class Trial:
    """Figures of the client that has most of each."""

    up: int
    """Bytes of an upload ..."""
    down: int
    """... and of a download."""
    step: float
    """Seconds of a training step."""
    peak: int
    """Bytes that this process has held at most."""


def tried(session: Session, config: RunConfig) -> Trial:
    """Exchange messages once, with one training step, and train one step more; nothing is kept.

    Raises CoterieError if the run cannot begin with what this machine has.
    """
    run = start(session, config)
    messages = first_exchange(run)
    up, down = (
        max(len(run.schema.send(way, found[way])) for found in messages.values())
        for way in ("up", "down")
    )
    began = time.monotonic()
    for side in run.clients.values():
        side.train(min(1, config.exchanges - 1))
    step = (time.monotonic() - began) / len(run.clients)
    unit = 1 if sys.platform == "darwin" else 1024
    return Trial(up, down, step, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

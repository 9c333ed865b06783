"""Trial of a run on this machine: measurements of one exchange with one training step."""

import time
from dataclasses import dataclass
from typing import Any

from coterie.config.run import RunConfig
from coterie.engines.local import LocalClients
from coterie.engines.rounds import Rounds
from coterie.engines.session import Session
from coterie.errors import Diverged
from coterie.memory import process_memory
from coterie.messages import Message
from coterie.messages.schema import Way
from coterie.runs import RunFolder
from coterie.training.context import ClientId
from coterie.turn import TRAIN

Messages = dict[ClientId, dict[Way, Message]]
"""For each client, the hello (the client's first message), an upload and the next download."""


class TrialRun(Rounds[LocalClients]):
    """A run in this process that keeps the last upload of each client's training."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(LocalClients, *args, **options)
        self.uploads: dict[ClientId, Message] = {}

    def take(self, name: ClientId, body: bytes) -> None:
        if self.turn.phase == TRAIN:
            self.uploads[name] = self.schema.receive("up", body)
        super().take(name, body)


def start(session: Session, config: RunConfig) -> TrialRun:
    """Create the client-side and server-side objects of a short run, and let the clients join.

    The short run has one training step per round. FedMKT is an exception, because the public text
    is not shortened: when a client or the server learns from the public samples, it trains on all
    of them, which usually takes more than one step.

    The short run scores models only if clients send their scores to the server. The batch size is
    not reduced, because the shapes of tensors in messages may depend on the batch size.
    """
    session.check(config)
    training = config.training.model_copy(update={"steps": 1})
    scoring = {"every": 1} if config.deployment.share_metrics else {"keep": "last"}
    evaluation = config.evaluation.model_copy(update={**scoring, "patience": None})
    short = config.model_copy(update={"training": training, "evaluation": evaluation})
    federation = session.federation(short)
    folder, server = RunFolder.temporary(), federation.server
    return TrialRun(short, session.base, federation.clients, folder, own=server)


def first_exchange(run: TrialRun) -> Messages:
    """Return the messages of the first exchange in which a client uploads anything.

    Clients and server do the same as in a real run. Messages are encoded and checked, but not sent
    over a network. If the method begins with rounds in which clients upload nothing, several
    exchanges are run. If the method never uploads anything, one exchange is run.

    Raises:
        Diverged: The training of a client diverged.
    """
    schema, names = run.schema, sorted(run.names)
    messages: Messages = {
        name: {"hello": schema.receive("hello", run.clients.host(name).hello())}
        for name in run.clients
    }
    for turn in map(run.config.turn, range(run.config.turns if schema.up else 1)):
        run.step(turn, names)
        if run.exchange.diverged:
            diverged = ", ".join(sorted(run.exchange.diverged))
            raise Diverged(
                f"The training of {diverged} diverged; a lower training.learning_rate may help."
            )
        if turn.closes and any(upload.groups or upload.values for upload in run.uploads.values()):
            break
    for name in names:
        messages[name]["up"] = run.uploads[name]
        messages[name]["down"] = schema.receive("down", run.download(name))
    return messages


@dataclass(frozen=True)
class Trial:
    """Measurements of a short run (see `start`). Sizes of messages are maxima over all clients."""

    up: int
    """The size of an upload in bytes."""
    down: int
    """The size of a download in bytes."""
    step: float
    """The mean duration of a client's training step in seconds."""
    peak: int
    """The peak memory of this process in bytes."""


def run_trial(session: Session, config: RunConfig) -> Trial:
    """Measure the messages of one exchange, the time of a training step, and the memory.

    The trained models are discarded.

    Raises:
        CoterieError: if the run cannot start on this machine.
    """
    run = start(session, config)
    messages = first_exchange(run)
    up, down = (
        max(len(run.schema.send(way, by_way[way])) for by_way in messages.values())
        for way in ("up", "down")
    )
    started = time.monotonic()
    for side in run.clients.values():
        side.train(config.turn(min(1, config.turns - 1)))
    step = (time.monotonic() - started) / len(run.clients)
    return Trial(up, down, step, process_memory())

"""A first exchange of a run on this machine, with one training step: what it sends and takes."""

import time
from dataclasses import dataclass

from coterie.aggregation.transform import TRAIN
from coterie.analysis.need import process_memory
from coterie.config.run import RunConfig
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.messages import Message
from coterie.messages.schema import Way
from coterie.runs import RunFolder
from coterie.training.context import ClientId

Messages = dict[ClientId, dict[Way, Message]]
"""Each client's hello, its upload of a round, and the download that answers it."""


def start(session: Session, config: RunConfig) -> LocalRun:
    """The sides of a run, joined, whose training is cut to one step a round.

    No model is compared or scored, unless clients tell the server how that went. The batch stays:
    what a method sends beside its adapter may be as large as its batches. So does the public text,
    over which FedMKT's server passes once.
    """
    session.check(config)
    training = config.training.model_copy(update={"steps": 1})
    told = {"every": 1} if config.deployment.share_metrics else {"keep": "last"}
    evaluation = config.evaluation.model_copy(update={**told, "patience": None})
    short = config.model_copy(update={"training": training, "evaluation": evaluation})
    who = session.federation(short)
    return local_run(short, session.base, who.clients, RunFolder.temporary(), own=who.server)


def first_exchange(run: LocalRun) -> Messages:
    """The messages of the first round in which anybody uploads something.

    Rounds are real ones, whose messages are encoded and checked as always but go nowhere. Methods
    that begin with rounds alone are waited for; if nothing may travel, one round is enough.
    """
    schema, names = run.schema, sorted(run.names)
    messages: Messages = {
        name: {"hello": schema.receive("hello", run.clients.part(name).hello())}
        for name in run.clients
    }
    for round in range(run.config.exchanges if schema.up else 1):
        run.exchange(round, run.names)
        for name in names:
            messages[name]["up"] = run.uploads.message(name)
        trained = run.config.turn(round)[1] == TRAIN
        if trained and any(m["up"].groups or m["up"].values for m in messages.values()):
            break
    for name in names:
        messages[name]["down"] = schema.receive("down", run.download(name))
    return messages


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
    return Trial(up, down, step, process_memory())

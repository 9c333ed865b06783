"""The messages of a run's first exchange, encoded and checked as always, and their sizes."""

import json

from torch import Tensor

from coterie.config import RunConfig
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.messages import Json, Message
from coterie.messages.schema import Way
from coterie.runs import RunFolder, Watch
from coterie.training.context import ClientId

Messages = dict[ClientId, dict[Way, Message]]
"""Each client's hello, its upload of a round, and the download that answers it."""
WHOLE = "whole message, with names"


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
    return local_run(short, session.base, who.clients, RunFolder.temporary(), Watch(), who.server)


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
        if any(m["up"].groups or m["up"].values for m in messages.values()):
            break
    for name in names:
        messages[name]["down"] = run.server.download(name)
    return messages


def size(part: Tensor | Json) -> int:
    """Bytes of a tensor, or of a value as JSON."""
    return part.nbytes if isinstance(part, Tensor) else len(json.dumps(part).encode())

"""Runs whose clients have texts of different lengths."""

from dataclasses import replace

from coterie.config.run import RunConfig
from coterie.data.kinds.text import Tokens
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.testing.rounds import joined

TOKENS = {"diarist": 500, "poet": 2000, "whaler": 1250}


def joined_with_tokens(run: RunConfig) -> LocalRun:
    """Return a run whose clients have TOKENS training tokens, if their data is text."""
    clients = [
        replace(p, data=replace(p.data, train=replace(train, ids=train.ids[: TOKENS[p.name]])))
        if isinstance(train := p.data.train, Tokens)
        else p
        for p in Session(run).participants(run)
    ]
    return joined(run, clients=clients)

"""Rounds by hand: the sides of a run in this process, with what travels between them at hand."""

from collections.abc import Mapping, Sequence

from coterie.aggregation.mean import Rule, weighted_mean
from coterie.config.run import RunConfig
from coterie.engines import runtime as part
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.federation.participants import Participant
from coterie.messages import Message
from coterie.runs import RunFolder, Watch


def joined(
    run: RunConfig, rule: Rule = weighted_mean, clients: Sequence[Participant] | None = None
) -> LocalRun:
    """A run's sides before its first round; with these clients, or its own."""
    session = Session(run)
    session.check(run)
    who = session.federation(run)
    folder, present = RunFolder.temporary(), who.clients if clients is None else clients
    return local_run(run, session.base, present, folder, Watch(), who.server, rule)


def down(local: LocalRun, name: str) -> Message:
    """What a client gets now, through its bytes and checks."""
    return local.schema.receive("down", local.schema.send("down", local.server.download(name)))


def up(local: LocalRun, name: str, round: int) -> Message:
    """What a client uploads now, through its bytes and checks."""
    return local.schema.receive(
        "up", local.clients.part(name)._sent("up", local.clients[name].upload(round))
    )


def step(local: LocalRun, name: str, round: int, download: Message | None = None) -> Message:
    """A client's part of a round; its upload. It takes this download, or the server's."""
    client = local.clients[name]
    client.receive(down(local, name) if download is None else download)
    client.train(round)
    return up(local, name, round)


def take(local: LocalRun) -> None:
    """Every client takes the server's word in, as after the last round."""
    for name in sorted(local.clients):
        local.clients[name].receive(down(local, name))


def close(local: LocalRun, round: int, uploads: Mapping[str, Message]) -> None:
    """The round ends: the server's side gets each upload that it needs, and the mean."""
    counted = (
        part.contribution(local.server, local.aggregation, name, uploads[name])
        for name in sorted(uploads)
    )
    local.close(local.aggregation.mean(round, counted))


def one_round(local: LocalRun, round: int, present: list[str] | None = None) -> dict[str, Message]:
    """A whole round of some clients, or all; their uploads."""
    names = sorted(local.clients if present is None else present)
    local.server.start_round(round, names)
    uploads = {name: step(local, name, round) for name in names}
    close(local, round, uploads)
    return uploads

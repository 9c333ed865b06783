"""The round loop as functions: the sides of a run in this process, one exchange at a time.

    run = joined(config)
    for exchange in range(config.exchanges):
        uploads = one_round(run, exchange)
    take(run)

`one_round` is `start_round`, a `step` of every client, and `close`. `step` is `down`, the client's
`receive` and `train`, and `up`. A loop of one's own calls these, or the sides themselves
(`run.clients[name]` and `run.server`), as examples/fedavg_loop.py does.
"""

from collections.abc import Mapping, Sequence

from coterie.config.run import RunConfig
from coterie.engines import server_part as part
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.federation.participants import Participant
from coterie.messages import Message
from coterie.runs import RunFolder


def joined(run: RunConfig, clients: Sequence[Participant] | None = None) -> LocalRun:
    """Return the sides of a run, before its first exchange, with all clients joined.

    Args:
        run: the run file.
        clients: the clients that take part; by default, those of the run file.
    """
    session = Session(run)
    session.check(run)
    who = session.federation(run)
    folder, present = RunFolder.temporary(), who.clients if clients is None else clients
    return local_run(run, session.base, present, folder, (), who.server)


def down(local: LocalRun, name: str) -> Message:
    """What a client gets now, through its bytes and checks."""
    return local.schema.receive("down", local.download(name))


def up(local: LocalRun, name: str, round: int) -> Message:
    """Return what a client uploads now, encoded, checked and decoded."""
    return local.schema.receive(
        "up", local.clients.part(name)._sent("up", local.clients[name].upload(round))
    )


def step(local: LocalRun, name: str, round: int, download: Message | None = None) -> Message:
    """Let a client receive a download (by default, the server's) and train; return its upload."""
    client = local.clients[name]
    client.receive(down(local, name) if download is None else download)
    client.train(round)
    return up(local, name, round)


def take(local: LocalRun) -> None:
    """Let every client receive a download, as after the last exchange."""
    for name in sorted(local.clients):
        local.clients[name].receive(down(local, name))


def close(local: LocalRun, round: int, uploads: Mapping[str, Message]) -> None:
    """End an exchange: give the server's side the uploads and their aggregate."""
    counted = (
        part.contribution(local.server, local.aggregation, name, uploads[name])
        for name in sorted(uploads)
    )
    local.close(local.aggregation.mean(round, counted), uploads)


def one_round(local: LocalRun, round: int, present: list[str] | None = None) -> dict[str, Message]:
    """Carry out an exchange of some clients, by default all; return their uploads by client."""
    names = sorted(local.clients if present is None else present)
    local.open(round, names)
    uploads = {name: step(local, name, round) for name in names}
    close(local, round, uploads)
    return uploads

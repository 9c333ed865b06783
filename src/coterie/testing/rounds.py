"""The round loop as functions, which execute a run in this process, one exchange at a time.

    run = joined(config)
    for turn in range(config.turns):
        uploads = one_round(run, turn)
    take(run)

`one_round` calls `open` of the run, `step` for every client, and `close`. `step` calls `down`,
`receive` and `train` of the client's method object, and `up`. Your own loop can call these
functions, or the methods of `run.clients[name]` and `run.server`, as in examples/fedavg_loop.py.
"""

from collections.abc import Mapping, Sequence

from coterie.config.run import RunConfig
from coterie.engines.local import LocalRun, local_run
from coterie.engines.session import Session
from coterie.federation.participants import Participant
from coterie.messages import Message
from coterie.runs import RunFolder


def joined(run: RunConfig, clients: Sequence[Participant] | None = None) -> LocalRun:
    """Create the method objects of the server and the clients, and let all clients join.

    Args:
        run: The run file.
        clients: The clients that take part; by default, all clients of the run file.

    Returns:
        The run before its first exchange. Its attribute `clients` maps names to the clients' method
        objects, and its attribute `server` is the server's method object.

    Raises:
        CoterieError: A text or a base cannot be read, or the method cannot carry out the run.
    """
    session = Session(run)
    session.check(run)
    federation, folder = session.federation(run), RunFolder.temporary()
    participants = federation.clients if clients is None else clients
    return local_run(run, session.base, participants, folder, (), federation.server)


def down(local: LocalRun, name: str) -> Message:
    """Return the server's download for a client.

    The download is first encoded, checked and decoded.

    Args:
        local: The run.
        name: The client's name.
    """
    return local.schema.receive("down", local.download(name))


def up(local: LocalRun, name: str, turn: int) -> Message:
    """Return a client's upload.

    The upload is first encoded, checked and decoded.

    Args:
        local: The run.
        name: The client's name.
        turn: The number of the turn, counted from 0. In most methods, a round is one turn.
    """
    host, at = local.clients.host(name), local.config.turn(turn)
    return local.schema.receive("up", host._serialise("up", host.upload(at), at))


def step(local: LocalRun, name: str, turn: int, download: Message | None = None) -> Message:
    """Let a client receive a download, train, and create its upload.

    Args:
        local: The run.
        name: The client's name.
        turn: The number of the turn, counted from 0. In most methods, a round is one turn.
        download: The download to receive; by default, the server's current download for the client.

    Returns:
        The client's upload.
    """
    client = local.clients[name]
    client.receive(down(local, name) if download is None else download)
    client.train(local.config.turn(turn))
    return up(local, name, turn)


def take(local: LocalRun) -> None:
    """Let every client receive the server's current download.

    After the last exchange of a run, this download contains the result of that exchange. Without
    this call, no client would receive the result, because no further exchange begins.

    Args:
        local: The run.
    """
    for name in sorted(local.clients):
        local.clients[name].receive(down(local, name))


def close(local: LocalRun, turn: int, uploads: Mapping[str, Message]) -> None:
    """End an exchange: let the server's method object aggregate the uploads.

    Args:
        local: The run.
        turn: The number of the turn, counted from 0. In most methods, a round is one turn.
        uploads: A mapping from the clients' names to the uploads to aggregate.
    """
    local.exchange.begin()
    for name in sorted(uploads):
        local.take(name, uploads[name].encode())
    local.exchange.settle()
    local.close()


def one_round(local: LocalRun, turn: int, present: list[str] | None = None) -> dict[str, Message]:
    """Execute an exchange with all or some clients.

    Args:
        local: The run.
        turn: The number of the turn, counted from 0. In most methods, a round is one turn.
        present: The names of the clients that take part; by default, all clients.

    Returns:
        A mapping from the clients' names to their uploads.
    """
    names = sorted(local.clients if present is None else present)
    local.open(local.config.turn(turn), names)
    uploads = {name: step(local, name, turn) for name in names}
    close(local, turn, uploads)
    return uploads

"""What leaves a client, and what never does: declared by the method, measured on real messages."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from coterie.api import Session
from coterie.config import RunConfig
from coterie.engines.local import LocalRun
from coterie.exchange import Message, State
from coterie.exchange.schema import Way
from coterie.methods import ClientId
from coterie.report.tables import Table
from coterie.runs import RunFolder, Watch

WAYS: dict[Way, str] = {
    "hello": "from the client to the server, once",
    "up": "from the client to the server, every round",
    "down": "from the server to the client, every round",
}
FIELDS = ("field", "shape", "dtype", "bytes")
STAYS = "never leaves"
Rows = tuple[tuple[str, ...], ...]


def audit_run(config: RunConfig) -> Iterator[Table]:
    """Tables: what the method declares; then, per client, what one round sent and what stayed.

    The round is a real one, of one training step, whose messages are encoded and checked as always
    but go nowhere. Clients that send the same fields share their tables.
    """
    training = config.training.model_copy(update={"steps": 1, "batch": 1})
    session = Session(config.model_copy(update={"training": training}))
    participants = session.participants(session.config)
    config.method.check([p.name for p in participants])
    run = LocalRun(session.config, session.base, participants, RunFolder(Path()), Watch())
    yield _declared(run)
    run.server.open(0, sorted(run.clients))
    alike: dict[tuple[tuple[str, Rows], ...], list[ClientId]] = {}
    for name in sorted(run.clients):
        alike.setdefault(tuple(_account(run, name)), []).append(name)
    for account, names in alike.items():
        for title, rows in account:
            columns = ["field", "tensors", "bytes"] if title == STAYS else FIELDS
            yield Table(f"{', '.join(names)}: {title}", columns, rows)


def _declared(run: LocalRun) -> Table:
    rows = [
        (field.pattern, field.dtype, where, field.what)
        for way, where in WAYS.items()
        for field in getattr(run.schema, way)
    ]
    title = f"{run.config.label} declares that nothing but this may travel"
    columns = ("field", "dtype", "way", "what")
    note = "Every message also says which round it belongs to."
    return Table(title, columns, rows or [("nothing", "", "", "")], note)


def _account(run: LocalRun, name: ClientId) -> Iterator[tuple[str, Rows]]:
    client = run.clients[name]
    down = run.server.download(name)
    messages: dict[Way, Message] = {"hello": client.hello(), "down": down, "up": client.step(down)}
    for way, where in WAYS.items():
        size = len(run.schema.send(way, messages[way]))
        yield where, (*_fields(messages[way]), ("whole message, with names", "", "", f"{size:,}"))
    yield STAYS, tuple(_stays(client.state(), messages["up"]))


def _fields(message: Message) -> Iterator[tuple[str, ...]]:
    for name, tensor in sorted(message.tensors.items()):
        shape = " x ".join(map(str, tensor.shape))
        yield name, shape, str(tensor.dtype).removeprefix("torch."), f"{tensor.nbytes:,}"
    for name, value in sorted(message.values.items()):
        yield name, "", "json", f"{len(json.dumps(value).encode()):,}"


def _stays(state: State, upload: Message) -> Iterator[tuple[str, ...]]:
    """The client's state, less what it uploaded, summed up by the first two parts of the names."""
    counts, sizes = Counter[str](), Counter[str]()
    for name, tensor in state.tensors.items():
        if name.partition("/")[2] not in upload.tensors:
            group = "/".join(name.split("/")[:2])
            counts[group] += 1
            sizes[group] += tensor.nbytes
    for group in sorted(counts):
        yield f"{group}/*", f"{counts[group]}", f"{sizes[group]:,}"
    yield "all text and tokens: training, validation and test", "", ""
    yield "all losses and scores, and whatever else is logged", "", ""

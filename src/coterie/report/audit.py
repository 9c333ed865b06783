"""What leaves a client, and what never does: declared by the method, measured on real messages."""

from collections import Counter
from collections.abc import Iterator, Mapping

from coterie.config import RunConfig
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.exchange import Message, State
from coterie.exchange.schema import Way
from coterie.methods import ClientId
from coterie.results.messages import WHOLE, first_exchange, size, start
from coterie.results.tables import Table

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

    The round is the first in which anybody uploads something; see `first_exchange`. Clients that
    send the same fields share their tables.
    """
    run = start(Session(config), config)
    yield _declared(run)
    alike: dict[tuple[tuple[str, Rows], ...], list[ClientId]] = {}
    for name, messages in first_exchange(run).items():
        alike.setdefault(tuple(_account(run, name, messages)), []).append(name)
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


def _account(
    run: LocalRun, name: ClientId, messages: Mapping[Way, Message]
) -> Iterator[tuple[str, Rows]]:
    for way, where in WAYS.items():
        weight = len(run.schema.send(way, messages[way]))
        whole = (WHOLE, "", "", f"{weight:,}")
        yield where, (*_fields(messages[way]), whole, *_shares(run, messages[way], weight))
    yield STAYS, tuple(_stays(run.clients[name].state(), messages["up"]))


def _shares(run: LocalRun, message: Message, weight: int) -> Iterator[tuple[str, ...]]:
    """What a whole message weighs for each of the things that it tells of."""
    for what, count in run.config.method.counts(message).items():
        if count:
            yield f"the same per {what} (of {count:,})", "", "", f"{weight / count:,.0f}"


def _fields(message: Message) -> Iterator[tuple[str, ...]]:
    for name, tensor in sorted(message.tensors.items()):
        shape = " x ".join(map(str, tensor.shape))
        yield name, shape, str(tensor.dtype).removeprefix("torch."), f"{size(tensor):,}"
    for name, value in sorted(message.values.items()):
        yield name, "", "json", f"{size(value):,}"


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
    yield "all losses and scores on these, and whatever else is logged", "", ""

"""What leaves a client, and what never does: declared by the method, measured on real messages."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from coterie.adapters import Parameter
from coterie.analysis.tables import Table
from coterie.analysis.trial import first_exchange, start
from coterie.config.run import RunConfig
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.messages import Field, Json, Message, Schema, State
from coterie.messages.names import CHANGE, LEFT_OUT, SECONDS
from coterie.messages.schema import Way
from coterie.training.context import ClientId

WAYS: dict[Way, str] = {
    "hello": "from the client to the server, once",
    "up": "from the client to the server, every round",
    "down": "from the server to the client, every round",
}
CONTENTS = ("group or value", "what", "tensors", "dtype", "bytes")
STAYS = "never leaves"
NEVER = (
    "Texts and tokens, their losses and scores, and all other logged values also stay on "
    "the client."
)
SHARED = (
    "Texts and tokens also stay on the client; losses and scores are sent "
    "(deployment.share_metrics)."
)
WHOLE = "whole message, with names"
SAME = "average per"
Row = tuple[str, ...]
Parameters = Mapping[str, Parameter]


def audit_run(config: RunConfig) -> Iterator[Table]:
    """Tables: what the method declares; then, per client, what one round sent and what stayed.

    The round is the first in which anybody uploads something; see `first_exchange`. Clients that
    send the same fields share their tables.
    """
    run = start(Session(config), config)
    yield _declared(run)
    yield _stands(run)
    shared = config.deployment.share_metrics
    never = SHARED if shared else NEVER
    alike: dict[tuple[Row, ...], dict[ClientId, list[Row]]] = {}
    exchanged = first_exchange(run)
    # A download may hand out what the client does not hold yet, and others do.
    sides = run.clients.values()
    parameters = {name: p for side in sides for name, p in side.parameters().items()}
    if shared:
        yield _figures(run)
    for name, messages in exchanged.items():
        account = list(_account(run, name, messages, parameters))
        # What a whole message weighs differs a little by the names in it.
        key = (row[:-1] if row[1].startswith((WHOLE, SAME)) else row for row in account)
        alike.setdefault(tuple(key), {})[name] = account
    for found in alike.values():
        every = [_together(rows) for rows in zip(*found.values(), strict=True)]
        for title in (*WAYS.values(), STAYS):
            rows = [row[1:] for row in every if row[0] == title]
            note = never if title == STAYS else ""
            yield Table(f"{', '.join(found)}: {title}", CONTENTS, rows, note)


def _stands(run: LocalRun) -> Table:
    """Where in their bases clients' adapters stand."""
    alike: dict[tuple[str, ...], list[ClientId]] = {}
    for name in run.clients:
        covered = run.clients.part(name).covered or ("nothing of the base",)
        alike.setdefault(covered, []).append(name)
    rows = [(", ".join(names), line) for lines, names in alike.items() for line in lines]
    return Table("what is trained", ("clients", "where in the base"), rows)


def _figures(run: LocalRun) -> Table:
    """What clients log and send beside their uploads, each kind of figure once."""
    round = run.server.exchange
    if round < run.config.exchanges:  # in which the aggregated models are scored
        run.exchange(round, run.names)
    recorded = (line for line in run.recorder.take() if line["client"] is not None)
    lines = [line for line in recorded if line["name"] not in (CHANGE, LEFT_OUT)]
    found = {line["name"]: _kind(line["value"]) for line in lines} | {SECONDS: "a number"}
    title = "figures sent beside every upload (deployment.share_metrics)"
    note = "The last upload also has the scores of the model that the client keeps, and its round."
    return Table(title, ("figure", "what"), sorted(found.items()), note)


def _kind(value: Json) -> str:
    if isinstance(value, Mapping):
        return f"numbers: {', '.join(sorted(value))}"
    return "numbers" if isinstance(value, Sequence) else "a number"


def _together(rows: Sequence[Row]) -> Row:
    """Rows that differ in their last figure at most, as one."""
    figures = sorted({row[-1] for row in rows}, key=lambda figure: (len(figure), figure))
    return (*rows[0][:-1], f"≤{figures[-1]}" if len(figures) > 1 else figures[-1])


def _declared(run: LocalRun) -> Table:
    rows = [
        (_named(field.name, field.peers), _dtypes(field), where, field.description)
        for way, where in WAYS.items()
        for field in {
            (f.name, f.description, f.peers): f for f in getattr(run.schema, way)
        }.values()
    ]
    title = f"{run.config.label}: the only fields that messages may contain"
    columns = ("group or value", "dtype", "way", "what")
    note = "Every message also contains its round number and format version."
    return Table(title, columns, rows or [("nothing", "", "", "")], note)


def _named(group: str, peers: bool) -> str:
    """Return a group's name in a table, which tells peers' tensors from the client's own."""
    return f"others' {group}" if peers else group


def _dtypes(field: Field) -> str:
    if isinstance(field.dtype, str):
        return field.dtype
    return ", ".join(map(": ".join, field.dtype.items()))


def _account(
    run: LocalRun, name: ClientId, messages: Mapping[Way, Message], parameters: Parameters
) -> Iterator[Row]:
    """What a client sent, took and kept: rows that begin with the title of their table."""
    side = run.clients[name]
    for way, where in WAYS.items():
        message, weight = messages[way], len(run.schema.send(way, messages[way]))
        yield from ((where, *row) for row in _contents(run.schema, way, message, parameters))
        yield where, WHOLE, "", "", "", f"{weight:,}"
        for what, count in run.config.method.counts(message).items():
            if count:
                each = f"{SAME} {what} (of {count:,})"
                yield where, each, "", "", "", f"{weight / count:,.0f}"
    yield from ((STAYS, *row) for row in _stays(side.state(), messages["up"], side.parameters()))


def _contents(schema: Schema, way: Way, message: Message, parameters: Parameters) -> Iterator[Row]:
    """A line for each kind of tensor, the other clients' together, and for each value."""
    found: dict[tuple[bool, str], list[tuple[str, Tensor]]] = {}
    for peer, group, name, tensor in message.tensors():
        found.setdefault((peer is not None, group), []).append((name, tensor))
    names = {f.name: f.dtype for f in getattr(schema, way) if not isinstance(f.dtype, str)}
    for (others, group), tensors in sorted(found.items()):
        yield from _kinds(_named(group, others), tensors, parameters, names.get(group, {}))
    for name, value in sorted(message.values.items()):
        yield name, "", "", "json", f"{size(value):,}"


def _kinds(
    where: str,
    tensors: Iterable[tuple[str, Tensor]],
    parameters: Parameters,
    named: Iterable[str] = (),
) -> Iterator[Row]:
    """Tensors by what they are: by role, expert and place, or by a name that has a meaning."""
    kinds: dict[tuple[str, str], list[Tensor]] = {}
    for name, tensor in tensors:
        what = _what(parameters[name]) if name in parameters else name if name in named else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        kinds.setdefault((what, dtype), []).append(tensor)
    for (what, dtype), alike in sorted(kinds.items()):
        shapes = sorted({"x".join(map(str, tensor.shape)) for tensor in alike})
        shown = ", ".join([*shapes[:2], *(["..."] if len(shapes) > 2 else [])])
        yield where, what, f"{len(alike)} ({shown})", dtype, f"{sum(map(size, alike)):,}"


def _what(parameter: Parameter) -> str:
    """`generalist 0, mlp.up`. Domain experts stand together: they are others on every layer."""
    numbered = parameter.expert is not None and parameter.role != "domain"
    role = f"{parameter.role} {parameter.expert}" if numbered else parameter.role
    return ", ".join(filter(None, (role, parameter.place)))


def _stays(state: State, upload: Message, parameters: Parameters) -> Iterator[Row]:
    """The client's state, less the trained tensors that it uploaded, and its values.

    What it uploads is in the group `adapter` of its own state, in whatever group it travels. A
    group or an inner state of another name is something else, even if its tensors have the same
    names.
    """
    sent = {name for _, _, name, _ in upload.tensors()}
    for path, inner in state.walk():
        for group, tensors in inner.groups.items():
            trained = not path and group == "adapter"
            kept = [(n, t) for n, t in tensors.items() if not (trained and n in sent)]
            where = ", ".join(path) or group
            if path and "training" in path[0]:
                total = sum(tensor.nbytes for _, tensor in kept)
                yield where, f"optimiser's {group}", f"{len(kept)}", "", f"{total:,}"
            else:
                yield from _kinds(where, kept, parameters)
        for name, value in inner.values.items():
            yield ", ".join((*path, name)), "", "", "json", f"{size(value):,}"


def size(value: Tensor | Json) -> int:
    """Return the bytes of a tensor, or of a value as JSON."""
    return value.nbytes if isinstance(value, Tensor) else len(json.dumps(value).encode())

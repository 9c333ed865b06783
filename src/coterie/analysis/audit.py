"""Audit of a run: the fields that messages may contain, and the bytes sent in one round.

The fields are declared by the method. The bytes are measured on real messages.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from coterie.adapters import Parameter
from coterie.analysis.tables import Table
from coterie.analysis.trial import first_exchange, start
from coterie.config.run import RunConfig
from coterie.engines.local import LocalRun
from coterie.engines.session import Session
from coterie.federation.statements import protection
from coterie.messages import Field, Json, Message, Schema, State
from coterie.messages.names import CHANGE, LEFT_OUT, SECONDS
from coterie.messages.schema import Reduce, Way
from coterie.training.context import ClientId

WAYS: dict[Way, str] = {
    "hello": "from the client to the server, once",
    "up": "from the client to the server, in one exchange",
    "down": "from the server to the client, in one exchange",
}
REDUCTIONS: dict[Reduce, str] = {
    "mean": "averaged over clients",
    "rows": "averaged over clients, with several sets of weights",
    "each": "not averaged",
}
OTHERS = "what reaches other clients, and what noise protects"
CONTENTS = ("group or value", "contents", "tensors", "dtype", "bytes")
STAYS = "stays on the client"
NEVER = (
    "Texts and tokens, their losses and scores, and all other logged values also stay on "
    "the client."
)
SHARED = (
    "Texts and tokens also stay on the client; losses and scores are sent "
    "(deployment.share_metrics)."
)
WHOLE = "whole message, including names"
AVERAGE = "average per"
Row = tuple[str, ...]
Parameters = Mapping[str, Parameter]


def audit_run(config: RunConfig) -> Iterator[Table]:
    """Yield the tables that describe the messages of a run and the state that stays on clients.

    The first table lists the fields that the method declares. Messages may contain no other fields.
    Further tables describe the state that stays on each client, and the client's messages in the
    first round in which any client uploads anything (see `first_exchange`). Clients with equal
    tables share one set of tables.
    """
    run = start(Session(config), config)
    yield _declared(run)
    yield Table(OTHERS, ("subject", "contents"), protection(config))
    yield _coverage(run)
    shared = config.deployment.share_metrics
    stays_note = SHARED if shared else NEVER
    groups: dict[tuple[Row, ...], dict[ClientId, list[Row]]] = {}
    exchanged = first_exchange(run)
    # A download may contain parameters that only other clients hold so far.
    sides = run.clients.values()
    parameters = {name: p for side in sides for name, p in side.parameters().items()}
    if shared:
        yield _shared_metrics(run)
    for name, messages in exchanged.items():
        account = list(_account(run, name, messages, parameters))
        # The sizes of JSON and of whole messages vary with the lengths of names and numbers.
        key = (
            row[:-1] if row[4] == "json" or row[1].startswith((WHOLE, AVERAGE)) else row
            for row in account
        )
        groups.setdefault(tuple(key), {})[name] = account
    for accounts in groups.values():
        merged = [_merged(rows) for rows in zip(*accounts.values(), strict=True)]
        for title in (*WAYS.values(), STAYS):
            rows = [row[1:] for row in merged if row[0] == title]
            note = stays_note if title == STAYS else ""
            yield Table(f"{', '.join(accounts)}: {title}", CONTENTS, rows, note)


def _coverage(run: LocalRun) -> Table:
    """Return a table of the base's layers covered by each client's adapter."""
    clients: dict[tuple[str, ...], list[ClientId]] = {}
    for name in run.clients:
        lines = run.clients.host(name).covered or ("none",)
        clients.setdefault(lines, []).append(name)
    rows = [(", ".join(names), line) for lines, names in clients.items() for line in lines]
    return Table("trained layers", ("clients", "location in the base"), rows)


def _shared_metrics(run: LocalRun) -> Table:
    """Return a table of the metrics that clients log and send with their uploads."""
    config, next_turn = run.config, run.turn.number + 1
    if next_turn < config.turns:  # the aggregated models are scored in the next exchange
        for turn in map(config.turn, range(next_turn, next_turn + len(config.phases))):
            run.step(turn, run.names)
    recorded = (line for line in run.recorder.take() if line["client"] is not None)
    lines = [line for line in recorded if line["name"] not in (CHANGE, LEFT_OUT)]
    kinds = {line["name"]: _kind(line["value"]) for line in lines} | {SECONDS: "a number"}
    title = "metrics sent with every upload (deployment.share_metrics)"
    note = (
        "A client keeps the model of one round. The last upload also contains the number of this "
        "round and the scores of this model."
    )
    return Table(title, ("metric", "contents"), sorted(kinds.items()), note)


def _kind(value: Json) -> str:
    if isinstance(value, Mapping):
        return f"numbers: {', '.join(sorted(value))}"
    return "numbers" if isinstance(value, Sequence) else "a number"


def _merged(rows: Sequence[Row]) -> Row:
    """Merge rows that differ only in the size in the last cell, and keep the largest size."""
    sizes = sorted({row[-1] for row in rows}, key=lambda size: (len(size), size))
    return (*rows[0][:-1], f"≤{sizes[-1]}" if len(sizes) > 1 else sizes[-1])


def _declared(run: LocalRun) -> Table:
    rows: list[Row] = []
    for way, title in WAYS.items():
        fields: tuple[Field, ...] = getattr(run.schema, way)
        for f in fields:
            direction = title if way == "hello" else f"{title.partition(',')[0]}, {f.when}"
            averaged = way == "up" and f.dtype != "json"
            contents = f.description + f" ({REDUCTIONS[f.reduce]})" * averaged
            rows.append((_named(f.name, f.peers), _dtypes(f), direction, contents))
    title = f"{run.config.label}: the only fields that messages may contain"
    columns = ("group or value", "dtype", "direction", "contents")
    note = "Every message also contains its round number and format version."
    return Table(title, columns, list(dict.fromkeys(rows)) or [("nothing", "", "", "")], note)


def _named(group: str, peers: bool) -> str:
    """Return the name that the audit's tables show for a group of tensors.

    If `peers` is true, the group is in `Message.peers`, so it was uploaded by clients other than
    the receiver. The word "others'" then precedes the group's name, as in "others' adapter".
    """
    return f"others' {group}" if peers else group


def _dtypes(field: Field) -> str:
    if isinstance(field.dtype, str):
        return field.dtype
    return ", ".join(map(": ".join, field.dtype.items()))


def _account(
    run: LocalRun, name: ClientId, messages: Mapping[Way, Message], parameters: Parameters
) -> Iterator[Row]:
    """Yield one client's rows for all tables of the audit.

    Each row begins with the title of the table to which the row belongs.
    """
    side = run.clients[name]
    for way, title in WAYS.items():
        message, total = messages[way], len(run.schema.send(way, messages[way]))
        yield from ((title, *row) for row in _contents(run.schema, way, message, parameters))
        yield title, WHOLE, "", "", "", f"{total:,}"
        for unit, count in run.config.method.counts(message).items():
            if count:
                average = f"{AVERAGE} {unit} (of {count:,})"
                yield title, average, "", "", "", f"{total / count:,.0f}"
    yield from ((STAYS, *row) for row in _stays(side.state(), messages["up"], side.parameters()))


def _contents(schema: Schema, way: Way, message: Message, parameters: Parameters) -> Iterator[Row]:
    """Yield a row for each kind of tensor in a message, and a row for each JSON value.

    If a download forwards the uploads of several clients, the tensors of these clients are
    combined.
    """
    groups: dict[tuple[bool, str], list[tuple[str, Tensor]]] = {}
    for peer, group, name, tensor in message.tensors():
        groups.setdefault((peer is not None, group), []).append((name, tensor))
    names = {f.name: f.dtype for f in getattr(schema, way) if not isinstance(f.dtype, str)}
    for (from_peers, group), tensors in sorted(groups.items()):
        yield from _kinds(_named(group, from_peers), tensors, parameters, names.get(group, {}))
    for name, value in sorted(message.values.items()):
        yield name, "", "", "json", f"{size(value):,}"


def _kinds(
    group: str,
    tensors: Iterable[tuple[str, Tensor]],
    parameters: Parameters,
    described: Iterable[str] = (),
) -> Iterator[Row]:
    """Yield a row for each kind of tensor in a group.

    The kind of a parameter consists of the parameter's role, expert and location in the base. The
    kind of any other tensor is the tensor's name if the name is in `described` (the names that the
    method's schema lists for the group). Otherwise, the kind is an empty string.
    """
    kinds: dict[tuple[str, str], list[Tensor]] = {}
    for name, tensor in tensors:
        fallback = name if name in described else ""
        kind = _kind_of_parameter(parameters[name]) if name in parameters else fallback
        dtype = str(tensor.dtype).removeprefix("torch.")
        kinds.setdefault((kind, dtype), []).append(tensor)
    for (kind, dtype), members in sorted(kinds.items()):
        shapes = sorted({"x".join(map(str, tensor.shape)) for tensor in members})
        shown = ", ".join([*shapes[:2], *(["..."] if len(shapes) > 2 else [])])
        yield group, kind, f"{len(members)} ({shown})", dtype, f"{sum(map(size, members)):,}"


def _kind_of_parameter(parameter: Parameter) -> str:
    """Return a text that describes a parameter, such as `generalist 1, mlp.up`.

    The text consists of the parameter's role (`generalist`), the number of the parameter's expert
    (counted from 1), and the location in the base (`mlp.up`). The number is omitted if the
    parameter belongs to no expert. It is also omitted if the same number denotes a different expert
    on every layer, as with FedAMoLE's domain experts.
    """
    number = parameter.expert if parameter.kind.numbered else None
    role = parameter.role if number is None else f"{parameter.role} {number + 1}"
    return ", ".join(filter(None, (role, parameter.place)))


def _stays(state: State, upload: Message, parameters: Parameters) -> Iterator[Row]:
    """Yield a row of the audit's table for each kind of tensor that stays on a client.

    A tensor in the state's group `adapter` does not stay on the client if the upload contains a
    tensor of the same name in any group. Tensors in other groups of the state and in nested states
    always stay, because an uploaded tensor of the same name is unrelated to them. The JSON values
    of all states also have rows.
    """
    sent = {name for _, _, name, _ in upload.tensors()}
    for path, inner in state.walk():
        for group, tensors in inner.groups.items():
            trained = not path and group == "adapter"
            private = [(n, t) for n, t in tensors.items() if not (trained and n in sent)]
            owner = ", ".join(path) or group
            if path and "training" in path[0]:
                total = sum(tensor.nbytes for _, tensor in private)
                yield owner, f"optimiser's {group}", f"{len(private)}", "", f"{total:,}"
            else:
                yield from _kinds(owner, private, parameters)
        for name, value in inner.values.items():
            yield ", ".join((*path, name)), "", "", "json", f"{size(value):,}"


def size(value: Tensor | Json) -> int:
    """Return the size of a value in bytes.

    For a tensor, this is the size of the data. For any other value, it is the size of the JSON
    encoding.
    """
    return value.nbytes if isinstance(value, Tensor) else len(json.dumps(value).encode())

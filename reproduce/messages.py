"""Tables of what the messages of an exchange weigh, by field (PCL, arXiv 2404.09753, table 5)."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coterie.analysis.audit import WHOLE, size
from coterie.analysis.tables import Summary, Table
from coterie.analysis.trial import first_exchange, start
from coterie.config.run import RunConfig
from coterie.engines.session import Session
from coterie.messages import Message
from coterie.messages.schema import Field, Schema, Way
from coterie.training.context import ClientId


@dataclass(frozen=True)
class Weight:
    """The size of one declared field, or of a whole message, for one client and exchange."""

    client: ClientId
    way: Way
    field: str
    what: str
    bytes: int


def traffic(session: Session, config: RunConfig) -> list[Weight]:
    """Bytes up and down per client of a method's first exchange, by declared field."""
    run = start(session, config)
    return [
        weight
        for name, messages in first_exchange(run).items()
        for way in ("up", "down")
        for weight in _weights(run.schema, way, name, messages[way])
    ]


def _weights(schema: Schema, way: Way, name: ClientId, message: Message) -> Iterable[Weight]:
    declared: tuple[Field, ...] = getattr(schema, way)
    sizes = {name: size(value) for name, value in message.values.items()}
    for _, group, _, tensor in message.tensors():
        sizes[group] = sizes.get(group, 0) + size(tensor)
    for one in {one.name: one for one in declared}.values():
        yield Weight(name, way, one.name, one.what, sizes.get(one.name, 0))
    yield Weight(name, way, WHOLE, "", len(schema.send(way, message)))


def fields(weights: Iterable[Weight]) -> list[dict[str, Any]]:
    """List every field of a message with its bytes by client."""
    found: dict[tuple[str, str, str], dict[ClientId, int]] = {}
    for weight in weights:
        sizes = found.setdefault((weight.way, weight.field, weight.what), {})
        sizes[weight.client] = weight.bytes
    return [
        {"way": way, "field": field, "what": what, "bytes": sizes}
        for (way, field, what), sizes in found.items()
    ]


def message_tables(summary: Summary) -> list[Table]:
    """Show each column as a table of fields; where clients differ, from least to most bytes."""
    paper = summary.get("paper", {})
    return [_messages(summary, column, paper.get(column, {})) for column in summary["columns"]]


def _messages(summary: Summary, column: str, paper: Mapping[str, str]) -> Table:
    heads, note = ["method", "way", "field", "what", "bytes"], ""
    if paper:
        heads, note = [*heads, "paper"], " Column `paper`: the paper's figures."
    rows = []
    for row, fields in summary["columns"][column].items():
        for one in fields:
            cells = [row, one["way"], one["field"], one["what"], _span(one["bytes"].values())]
            theirs = paper.get(one["field"], "") if one["way"] == "up" else ""
            rows.append((*cells, theirs) if paper else tuple(cells))
    return Table(
        f"{summary['table']}: {column}",
        heads,
        rows,
        f"Bytes per client and exchange, without the messages sent once at the start.{note}",
    )


def _span(sizes: Collection[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"

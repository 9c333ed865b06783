"""Tables of the sizes of an exchange's messages, by field (PCL, arXiv 2404.09753, table 5)."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from coterie.analysis.audit import WHOLE, size
from coterie.analysis.tables import Summary, Table
from coterie.analysis.trial import first_exchange, start
from coterie.config.run import RunConfig
from coterie.engines.session import Session
from coterie.messages import Message
from coterie.messages.schema import Field, Schema, Way
from coterie.training.context import ClientId


def traffic(session: Session, config: RunConfig) -> list[dict[str, Any]]:
    """Return the fields of a method's first exchange, up and down, with their bytes by client."""
    run = start(session, config)
    weights: dict[tuple[Way, str, str], dict[ClientId, int]] = {}
    for client, messages in first_exchange(run).items():
        for way in ("up", "down"):
            for field, description, weight in _weights(run.schema, way, messages[way]):
                weights.setdefault((way, field, description), {})[client] = weight
    return [
        {"way": way, "field": field, "what": description, "bytes": sizes}
        for (way, field, description), sizes in weights.items()
    ]


def _weights(schema: Schema, way: Way, message: Message) -> Iterator[tuple[str, str, int]]:
    """Yield the name, description and bytes of each field, then of the whole message."""
    declared: tuple[Field, ...] = getattr(schema, way)
    sizes = {name: size(value) for name, value in message.values.items()}
    for _, group, _, tensor in message.tensors():
        sizes[group] = sizes.get(group, 0) + size(tensor)
    for field in {field.name: field for field in declared}.values():
        yield field.name, field.description, sizes.get(field.name, 0)
    yield WHOLE, "", len(schema.send(way, message))


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
        for field in fields:
            way, name = field["way"], field["field"]
            cells = [row, way, name, field["what"], _span(field["bytes"].values())]
            published = paper.get(name, "") if way == "up" else ""
            rows.append((*cells, published) if paper else tuple(cells))
    return Table(
        f"{summary['table']}: {column}",
        heads,
        rows,
        f"Bytes per client and exchange, without the messages sent once at the start.{note}",
    )


def _span(sizes: Collection[int]) -> str:
    least, most = min(sizes), max(sizes)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"

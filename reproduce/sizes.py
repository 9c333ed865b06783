"""How many tokens each client's splits have (CoMiGS, arXiv 2409.13931, table 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.analysis.tables import Summary, Table
from coterie.data.kinds.text import Tokens
from coterie.federation import Participant
from coterie.training.context import ClientId

SPLITS = ("train", "validation", "test")
Sizes = dict[ClientId, dict[str, int]]


def sizes(participants: Sequence[Participant]) -> Sizes:
    """The tokens of each client's splits; samples where the data are no plain text."""
    found: Sizes = {}
    for one in participants:
        splits = {split: getattr(one.data, split) for split in SPLITS}
        found[one.name] = {
            name: len(split.ids if isinstance(split, Tokens) else split)
            for name, split in splits.items()
        }
    return found


@dataclass(frozen=True)
class SizesTable:
    """The sizes of a table's every column; with the paper's, as text, by client."""

    title: str
    columns: Mapping[str, Sizes]
    command: str = ""
    """What fills the table in."""
    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "table": self.title,
            "shows": "tokens",
            "command": self.command,
            "columns": dict(self.columns),
            "paper": dict(self.paper),
        }

    def tables(self) -> list[Table]:
        """For the screen."""
        return size_tables(self.summary())


def size_tables(summary: Summary) -> list[Table]:
    """Of `SizesTable.summary`: a table per column, with a row per client."""
    return [_table(summary, name) for name in summary["columns"]]


def _table(summary: Summary, column: str) -> Table:
    paper = summary["paper"].get(column, {})
    rows = [
        (
            client,
            *(f"{found[split]:,}" for split in SPLITS),
            *([paper.get(client, "")] if paper else []),
        )
        for client, found in summary["columns"][column].items()
    ]
    return Table(
        f"{summary['table']}: {column}",
        ("client", *SPLITS, *(["paper"] if paper else [])),
        rows,
        "Tokens of each split within data.limits; of instructions and conversations, samples.",
    )

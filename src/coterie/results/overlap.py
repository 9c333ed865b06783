"""How much the clients' texts have in common: the Jaccard index of their sets of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.federation import Participant
from coterie.results.tables import Summary, Table
from coterie.training.context import ClientId

Shares = dict[ClientId, dict[ClientId, float]]


def jaccard(participants: Sequence[Participant]) -> Shares:
    """|Ti & Tj| / |Ti | Tj| for every two clients, T the token ids that a training text uses.

    CoMiGS (arXiv 2409.13931), table 3.
    """
    sets = {p.name: set(p.data.train.ids.unique().tolist()) for p in participants}
    return {
        one: {two: len(a & b) / len(a | b) for two, b in sets.items()} for one, a in sets.items()
    }


@dataclass(frozen=True)
class OverlapTable:
    """The matrix of a table's every column."""

    title: str
    columns: Mapping[str, Shares]
    command: str = ""
    """What fills the table in."""

    def summary(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "table": self.title,
            "shows": "jaccard",
            "command": self.command,
            "columns": dict(self.columns),
        }

    def tables(self) -> list[Table]:
        """For the screen."""
        return overlap_tables(self.summary())


def overlap_tables(summary: Summary) -> list[Table]:
    """Of `OverlapTable.summary`: a table per column, with a row and a column per client."""
    return [
        Table(
            f"{summary['table']}: {name}",
            ("client", *shares),
            [(client, *(f"{v:.2f}" for v in row.values())) for client, row in shares.items()],
            "Jaccard index of the sets of token ids in the training texts; 1 means identical sets.",
        )
        for name, shares in summary["columns"].items()
    ]

"""How much the clients' texts have in common: the Jaccard index of their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coterie.federation import Participant
from coterie.results.tables import Summary, Table
from coterie.training.context import ClientId

Shares = dict[ClientId, dict[ClientId, float]]


def jaccard(participants: Sequence[Participant]) -> Shares:
    """|Di & Dj| / (|Di| + |Dj|) for every two clients, D the multiset of a training text's tokens.

    0 to 0.5. PCL (arXiv 2404.09753), table 3.
    """
    longest = 1 + max(int(p.data.train.ids.max()) for p in participants)
    counts = {p.name: torch.bincount(p.data.train.ids, minlength=longest) for p in participants}
    return {
        one: {two: (a.minimum(b).sum() / (a.sum() + b.sum())).item() for two, b in counts.items()}
        for one, a in counts.items()
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
            "Jaccard index of the multisets of tokens in training texts; 0.5 means identical ones.",
        )
        for name, shares in summary["columns"].items()
    ]

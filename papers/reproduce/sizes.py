"""How many tokens each client's splits have (CoMiGS, arXiv 2409.13931, table 3)."""

from collections.abc import Sequence

from coterie.analysis.tables import Summary, Table
from coterie.data.kinds.text import Tokens
from coterie.federation.participants import Participant
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


def size_tables(summary: Summary) -> list[Table]:
    """Show a table for each column, with a row for each client."""
    note = "Tokens of each split within data.limits; of instructions and conversations, samples."
    tables = []
    for column, clients in summary["columns"].items():
        paper = summary["paper"].get(column, {})
        heads = ["client", *SPLITS, *(["paper"] if paper else [])]
        rows = []
        for client, found in clients.items():
            theirs = [paper.get(client, "")] if paper else []
            rows.append([client, *(f"{found[split]:,}" for split in SPLITS), *theirs])
        tables.append(Table(f"{summary['table']}: {column}", heads, rows, note))
    return tables

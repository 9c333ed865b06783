"""Numbers of tokens in each client's splits (CoMiGS, arXiv 2409.13931, table 3)."""

from collections.abc import Sequence

from coterie.analysis.tables import Summary, Table
from coterie.data.kinds.text import Tokens
from coterie.federation.participants import Participant
from coterie.training.context import ClientId

SPLITS = ("train", "validation", "test")
Sizes = dict[ClientId, dict[str, int]]


def sizes(participants: Sequence[Participant]) -> Sizes:
    """Count the tokens in each client's splits, or the samples if the data is not plain text."""
    counts: Sizes = {}
    for participant in participants:
        splits = {split: getattr(participant.data, split) for split in SPLITS}
        counts[participant.name] = {
            name: len(split.ids if isinstance(split, Tokens) else split)
            for name, split in splits.items()
        }
    return counts


def size_tables(summary: Summary) -> list[Table]:
    """Show a table for each column, with a row for each client."""
    note = "Tokens of each split within data.limits; of instructions and conversations, samples."
    tables = []
    for column, clients in summary["columns"].items():
        paper = summary["paper"].get(column, {})
        heads = ["client", *SPLITS, *(["paper"] if paper else [])]
        rows = []
        for client, counts in clients.items():
            published = [paper.get(client, "")] if paper else []
            rows.append([client, *(f"{counts[split]:,}" for split in SPLITS), *published])
        tables.append(Table(f"{summary['table']}: {column}", heads, rows, note))
    return tables

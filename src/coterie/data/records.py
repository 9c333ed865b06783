"""Records with fields: read from a client's files, and made the items that a model learns from."""

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from coterie.data.files import Record, find_files, read_records, resolve
from coterie.data.kinds.conversations import conversations
from coterie.data.kinds.instructions import instructions
from coterie.data.kinds.preferences import preferences
from coterie.data.spec import DataSpec
from coterie.errors import CoterieError


def field_records(root: Path, source: str, owner: str) -> list[Record]:
    """The records of a file or folder without .txt files, which have no fields for a template."""
    files = find_files(resolve(root, source), owner)
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"{owner}: {file} is plain text without the fields that data.instructions "
                "and its kin need; give .jsonl or .parquet records, or remove the key."
            )
    return [record for file in files for record in read_records(file, owner)]


def items_by_split(records: Mapping[str, Sequence[Record]], data: DataSpec) -> dict[str, list[Any]]:
    """Return the items of each split's records, which are read together: see `items_of`."""
    items = iter(items_of(list(chain(*records.values())), data))
    return {split: list(islice(items, len(part))) for split, part in records.items()}


def items_of(records: Sequence[Record], data: DataSpec) -> Sequence[Any]:
    """Return the instructions, conversations or preferences of records, in their order.

    Choices of instructions that the run file does not give are found in all of them.
    """
    if data.messages is not None:
        return conversations(records, data.messages)
    if data.preferences is not None:
        return preferences(records, data.preferences)
    assert data.instructions is not None, "else records are text"
    return instructions(records, data.instructions)

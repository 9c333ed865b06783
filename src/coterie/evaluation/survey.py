"""Counts of unused fields, skipped files and empty records in clients' files."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.data.division.spec import DivideSpec
from coterie.data.files import find_files, parquet_fields, read_records, resolve, skipped_files
from coterie.data.kinds.conversations import is_nothing
from coterie.data.spec import DataSpec
from coterie.data.templates import names_in

Counts = Mapping[str, Mapping[str, int]]
"""Numbers of records for each field and owner, or numbers of files for each suffix and owner.

The outer mapping has fields or suffixes as its keys. The inner mappings have owners as their keys,
for example "Client anna".
"""


@dataclass(frozen=True)
class Survey:
    """Counts of unused record fields, skipped files and empty records in the data of a run.

    Hub data sets are not examined.
    """

    empty: int
    """The number of records without text."""
    unused: Counts
    """For each unused field and each owner, the number of records with a value in the field."""
    skipped: Counts
    """For each suffix and each owner, the number of skipped files and links in folders."""


def survey(
    sources: Iterable[tuple[str, str]], data: DataSpec, divide: DivideSpec | None, root: Path
) -> Survey:
    """Count the unused fields, skipped files and empty records of clients' files.

    Args:
        sources: Pairs of an owner and a path, such as ("Client anna", "notes.jsonl").
        data: The run file's section `data:`.
        divide: The run file's section `divide:`, or None if there is no such section.
        root: The folder to which relative paths refer.

    Returns:
        The number of empty records; for each unused field, the number of records with a value in
        this field; and the number of skipped files.
    """
    used = data.bound.used()
    if divide is not None:
        used |= {divide.label, *([] if divide.where is None else names_in(divide.where))}
    empty = 0
    unused: dict[str, Counter[str]] = {}
    skipped: dict[str, Counter[str]] = {}
    for owner, path in ((owner, resolve(root, source)) for owner, source in sources):
        if not path.exists():
            continue  # a hub data set, which is not read a second time
        for kind, count in skipped_files(path, owner).items():
            skipped.setdefault(kind, Counter())[owner] += count
        for file in find_files(path, owner):
            held, blank = _held(file, owner, data)
            empty += blank
            for field in held.keys() - used:
                unused.setdefault(field, Counter())[owner] += held[field]
    # Plain dicts, as `dataclasses.asdict` breaks Counters: it counts their items.
    plain = [
        {key: dict(by_owner) for key, by_owner in counts.items()} for counts in (unused, skipped)
    ]
    return Survey(empty, *plain)


def _held(file: Path, owner: str, data: DataSpec) -> tuple[Counter[str], int]:
    """Count the blank records of a file, and for each field, the records with a value in the field.

    Blank records are counted only for plain text. All other kinds of data report an error for a
    blank record, so there is nothing to count.

    Returns:
        For each field, the number of records with a value in the field; and the number of blank
        records.
    """
    held: Counter[str] = Counter()
    blank = 0
    parquet = file.suffix.lower() == ".parquet"
    if parquet:
        held.update(parquet_fields(file))
    if file.suffix.lower() == ".txt" or (parquet and data.samples):
        return held, 0
    for record in read_records(file, owner):
        if not parquet:
            held.update(name for name, value in record.fields.items() if not is_nothing(value))
        blank += not data.samples and not record.text(data.fields).strip()
    return held, blank

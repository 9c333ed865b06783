"""Counts of unused fields, skipped files and empty records in clients' files."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.data.divide_spec import DivideSpec
from coterie.data.files import find_files, parquet_fields, read_records, resolve, skipped_files
from coterie.data.kinds.conversations import is_nothing
from coterie.data.spec import DataSpec
from coterie.data.templates import names_in

Counts = Mapping[str, Mapping[str, int]]
"""The number of records or files for each field or suffix and each owner ("Client anna")."""


@dataclass(frozen=True)
class Survey:
    """The parts of clients' files that the run does not read. Hub data sets are not surveyed."""

    empty: int
    """The number of records without text."""
    unused: Counts
    """The number of records with a value in an unused field, by field and owner."""
    skipped: Counts
    """The number of skipped files and links in folders, by suffix and owner."""


def survey(
    sources: Iterable[tuple[str, str]], data: DataSpec, divide: DivideSpec | None, root: Path
) -> Survey:
    """Count the unused fields, skipped files and empty records of clients' files.

    Args:
        sources: The owner and the path of each source, such as ("Client anna", "notes.jsonl").
        data: The run file's section `data:`.
        divide: The run file's section `divide:`, if any.
        root: The folder to which relative paths refer.

    Returns:
        The numbers of empty records, of records by unused field, and of skipped files.
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
    """Return the number of a file's records with a value in each field, and of blank records.

    Blank records are counted only for plain text: for samples, a record without text is an error.
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

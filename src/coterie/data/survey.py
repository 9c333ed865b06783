"""Counts of what is not read of clients' files: fields, files and empty records."""

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
"""By what is left out and by its owner, such as "Client anna": how many records or files."""


@dataclass(frozen=True)
class Survey:
    """What is not read of the files. Datasets of the hub are not looked at."""

    empty: int
    """Records without text."""
    unused: Counts
    """Records that have something in a field that the run does not use, by field."""
    skipped: Counts
    """Files of folders that are not read, by suffix, and links to folders."""


def survey(
    sources: Iterable[tuple[str, str]], data: DataSpec, divide: DivideSpec | None, root: Path
) -> Survey:
    """Return what is left out of sources, each with its owner."""
    used = data.bound.used()
    if divide is not None:
        used |= {divide.label, *([] if divide.where is None else names_in(divide.where))}
    empty = 0
    unused: dict[str, Counter[str]] = {}
    skipped: dict[str, Counter[str]] = {}
    for owner, path in ((owner, resolve(root, source)) for owner, source in sources):
        if not path.exists():
            continue  # a data set of the hub, which is not read twice
        for kind, count in skipped_files(path, owner).items():
            skipped.setdefault(kind, Counter())[owner] += count
        for file in find_files(path, owner):
            held, blank = _held(file, owner, data)
            empty += blank
            for field in held.keys() - used:
                unused.setdefault(field, Counter())[owner] += held[field]
    # Plain mappings, as `dataclasses.asdict` would count the items of a Counter anew.
    plain = [{what: dict(by) for what, by in found.items()} for found in (unused, skipped)]
    return Survey(empty, *plain)


def _held(file: Path, owner: str, data: DataSpec) -> tuple[Counter[str], int]:
    """Return how many of a file's records have something in each field, and how many are blank.

    Samples without text are errors, so no blank ones are counted.
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

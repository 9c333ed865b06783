"""Reading of texts and records from files and folders.

Error messages begin with the argument `owner`, such as "Client anna", and name the file.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidfuzz import process

from coterie.errors import CoterieError
from coterie.files import expanded, parse_json, read_file, refuse_special

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Unreadable:
    """A placeholder for a field's value that cannot be decoded.

    An error is raised only when the field is used. In an unused field, such a value does no harm.
    """

    why: str


@dataclass(frozen=True)
class Record:
    """The values of a record's fields, and the record's location for error messages."""

    where: str
    """The record's location in error messages, such as "Client anna: line 3 of notes.jsonl"."""
    fields: dict[str, Any]
    """A mapping of field names to values. None replaces NaN and infinity."""
    remedy: str = "Correct the field name in the run file."
    """The advice with which an error message about a missing field ends."""

    def __post_init__(self) -> None:
        """Replace NaN and infinity, which some programs write for empty cells, with None."""
        for name, value in self.fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                self.fields[name] = None

    def __getitem__(self, field: str) -> Any:
        """Return a field's value.

        Raises:
            CoterieError: The record has no such field, or its value cannot be decoded.
        """
        if field not in self.fields:
            names = ", ".join(self.fields) or "none"
            near = process.extractOne(field, list(self.fields), score_cutoff=60)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise CoterieError(
                f"{self.where} has no field {field}{hint}; its fields are: {names}. {self.remedy}"
            )
        if isinstance(value := self.fields[field], Unreadable):
            raise CoterieError(
                f"{self.where}: field {field} cannot be read ({value.why}); export the file again."
            )
        return value

    def unfit(self, field: str, value: Any, expected: str) -> CoterieError:
        """Return the error for a field with an unsuitable value.

        Args:
            field: The field's name.
            value: The field's value.
            expected: A description of suitable values and a remedy, as in "a list; fix the record".
        """
        return CoterieError(f"{self.where}: field {field} contains {value!r:.60}, not {expected}.")

    def text(self, fields: Sequence[str]) -> str:
        """Return the texts of some fields, joined by newlines.

        Raises:
            CoterieError: A field is missing, its value is not a string, or the string contains a
                lone surrogate and is therefore not valid Unicode.
        """
        values = [self[field] for field in fields]
        for field, value in zip(fields, values, strict=True):
            if not isinstance(value, str):
                raise CoterieError(
                    f"{self.where}: field {field} contains {type(value).__name__}, not text; "
                    "fix the record or name another field."
                )
        text = "\n".join(values)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise CoterieError(
                f"{self.where} contains half a character (a lone surrogate) at character "
                f"{error.start} of its text; fix or remove it."
            ) from error
        return text


def resolve(root: Path, source: str) -> Path:
    """Return the absolute path of a file or folder that a run file names.

    Args:
        root: The folder to which relative paths refer.
        source: The path in the run file. A leading `~` stands for the user's home folder.
    """
    return root / expanded(source)


def find_files(path: Path, owner: str) -> list[Path]:
    """Return the data files at a path, in sorted order.

    If the path is a file, the result is this file. If the path is a folder, the folder and its
    subfolders are searched. Hidden files and folders are skipped.

    Raises:
        CoterieError: The path does not exist, is a folder without data files, or is a file that is
            not a data file. The message begins with `owner`.
    """
    if path.is_dir():
        files, skipped = _listed(path, owner)
        if not files:
            others = f" (it has {listed(skipped)})" if skipped else ""
            raise CoterieError(
                f"{owner}: the folder {path} contains no {_SUFFIX_LIST} file{others}; add one or "
                "name another folder."
            )
        return sorted(files, key=Path.as_posix)
    if not path.exists():
        raise CoterieError(
            f"{owner}: there is no file or folder {path}; correct the path in the run file."
        )
    if path.suffix.lower() not in SUFFIXES:
        raise CoterieError(
            f"{owner}: {path} is not a {_SUFFIX_LIST} file; convert it, or correct its file "
            "extension."
        )
    return [path]


def skipped_files(path: Path, owner: str) -> Counter[str]:
    """Count the files that `find_files` skips in a folder.

    Returns:
        A counter with the number of skipped files for each suffix. It also contains the numbers of
        hidden files and folders, of special files, of links to folders, and of broken links. If the
        path is a file, the counter is empty.
    """
    return _listed(path, owner)[1] if path.is_dir() else Counter()


def _listed(folder: Path, owner: str) -> tuple[list[Path], Counter[str]]:
    """Return a folder's data files, and the numbers of files and links that are skipped."""

    def refuse(error: OSError) -> None:
        raise CoterieError(
            f"{owner}: the folder {error.filename} cannot be read ({error.strerror}); check its "
            "permissions."
        ) from error

    files: list[Path] = []
    skipped: Counter[str] = Counter()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        for name in [*folders, *names]:
            path = Path(parent, name)
            is_folder = path.is_dir()
            if name.startswith("."):
                skipped["hidden"] += 1
            elif is_folder:
                skipped["links to folders"] += path.is_symlink()
            elif not path.is_file():
                skipped["broken links" if path.is_symlink() else "special files"] += 1
            elif path.suffix.lower() in SUFFIXES:
                files.append(path)
            else:
                skipped[path.suffix.lower() or "without suffix"] += 1
        folders[:] = [name for name in folders if not name.startswith(".")]
    return files, +skipped


def listed(counts: Mapping[str, int]) -> str:
    """Format counts as part of a sentence, for example as "3 .md, 1 hidden"."""
    return ", ".join(f"{count:,} {noun}" for noun, count in sorted(counts.items()))


def listed_first(parts: Sequence[str], most: int = 5) -> str:
    """Join the first `most` parts, and count the remaining parts, as in "anna, ben, 2 more"."""
    rest = [f"{len(parts) - most:,} more"] * (len(parts) > most)
    return ", ".join([*parts[:most], *rest])


_SUFFIX_LIST = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def read_text(file: Path, owner: str) -> str:
    """Read a UTF-8 file without changes, except that a byte order mark is removed.

    Raises:
        CoterieError: The file cannot be read, is blank, or is not UTF-8 text. The message begins
            with `owner`.
    """
    try:
        raw = read_file(file)
    except OSError as error:
        raise CoterieError(
            f"{owner}: {file} cannot be read ({error.strerror}); check its permissions."
        ) from error
    if not raw.strip():
        raise CoterieError(f"{owner}: {file} is empty; add text or remove the file.")
    if b"\0" in raw:
        raise CoterieError(
            f"{owner}: {file} is not text (it contains NUL bytes); export it as plain text in "
            "UTF-8."
        )
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise CoterieError(
            f"{owner}: {file} is not UTF-8 (at byte {error.start}); save it again in UTF-8."
        ) from error


def read_records(file: Path, owner: str) -> Iterator[Record]:
    """Yield the records of a .jsonl or .parquet file.

    Raises:
        CoterieError: The file cannot be read, or has no records. The message begins with `owner`.
    """
    records = _read_parquet if file.suffix.lower() == ".parquet" else _read_jsonl
    empty = True
    for record in records(file, owner):
        empty = False
        yield record
    if empty:
        raise CoterieError(f"{owner}: {file} has no records; add some or remove the file.")


def _read_jsonl(file: Path, owner: str) -> Iterator[Record]:
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(read_text(file, owner).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{owner}: line {number} of {file}"
        try:
            fields = parse_json(line, missing=True)
        except json.JSONDecodeError as error:
            raise CoterieError(
                f"{where} is not valid JSON ({error.msg} at column {error.colno}); fix that line."
            ) from error
        except ValueError as error:
            raise CoterieError(f"{where} cannot be read ({error!s:.80}); fix that line.") from error
        if not isinstance(fields, dict):
            raise CoterieError(
                f'{where} is not a JSON object; write it as {{"field": "value", ...}}.'
            )
        yield Record(where, fields)


def _read_parquet(file: Path, owner: str) -> Iterator[Record]:
    import pyarrow.parquet  # slow to import, and not needed to list files

    number = 0
    try:
        refuse_special(file)
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            names = batch.schema.names
            if len(names) > len(set(names)):
                raise CoterieError(
                    f"{owner}: {file} has two columns with the same name; rename one and export it "
                    "again."
                )
            columns = [_values(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                number += 1
                fields = dict(zip(names, values, strict=True))
                yield Record(f"{owner}: record {number} of {file}", fields)
    except (pyarrow.ArrowException, OSError) as error:
        raise CoterieError(
            f"{owner}: {file} cannot be read as Parquet ({error}); export it again."
        ) from error


def parquet_fields(file: Path) -> dict[str, int]:
    """Return the number of non-null values in each column of a Parquet file."""
    import pyarrow.parquet

    refuse_special(file)
    table = pyarrow.parquet.read_table(file)
    return {name: len(table) - table[name].null_count for name in table.column_names}


def _values(column: "pyarrow.Array") -> list[Any]:
    """Return the values of a column, with `Unreadable` for values that Python cannot represent."""
    try:
        return column.to_pylist()
    except Exception:  # the exception's class depends on the column's type
        return [_value(scalar) for scalar in column]


def _value(scalar: "pyarrow.Scalar") -> Any:
    try:
        return scalar.as_py()
    except Exception as error:  # the exception's class depends on the column's type
        return Unreadable(f"{error!s:.80}")

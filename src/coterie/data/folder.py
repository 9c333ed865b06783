"""The clients and the kind of data of a folder of texts, for which no run file exists yet."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from coterie.data.files import SUFFIXES, find_files, listed, read_records, skipped_files
from coterie.data.texts import SPLITS
from coterie.errors import CoterieError
from coterie.names import client_name, name_of_label

KINDS: tuple[tuple[str, set[str], dict[str, Any]], ...] = (
    ("conversations", {"messages"}, {"messages": True}),
    ("conversations", {"conversations"}, {"messages": True}),
    ("preferences", {"chosen", "rejected"}, {"preferences": True}),
    ("instructions", {"instruction", "output"}, {"instructions": {"template": "alpaca"}}),
    ("plain text", {"text"}, {}),
)
"""For each kind of data: a phrase, fields of its records, and keys of the section `data:`."""


@dataclass(frozen=True)
class TextFolder:
    """A folder in which each file or subfolder contains the text of one client."""

    clients: dict[str, dict[str, Path]]
    """For each client's name, its file or folder by key: `path`, or `train` and other splits."""
    kind: str
    """A phrase for the kind of data, such as "plain text"."""
    data: dict[str, Any]
    """The keys of the section `data:` that select the kind of data."""


def read_folder(folder: Path) -> TextFolder:
    """Derive the clients and the kind of data from a folder of texts.

    Each file and each subfolder belongs to one client, whose name is that of the file or subfolder.
    If a subfolder contains only `train` and perhaps `validation` and `test`, each of which is a
    file or folder, these are the client's splits. The kind of data is recognised by the fields of
    the first record of each file.

    Raises:
        CoterieError: The folder contains a run file, no text, or files of other kinds.
    """
    if not folder.is_dir():
        raise CoterieError(f"There is no folder {folder}; name a folder with the clients' texts.")
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    _check_entries(folder, entries)
    files = {path: find_files(path, str(path)) for path in entries}
    if not files:
        find_files(folder, str(folder))  # reports that there is no text
    clients: dict[str, dict[str, Path]] = {}
    owners: dict[str, Path] = {}
    for number, path in enumerate(entries, start=1):
        name = _name(path, number)
        if (other := owners.setdefault(name.lower(), path)) != path:
            raise CoterieError(
                f"{other} and {path} both give the client name {name}; rename one of them, or put "
                "both into one folder."
            )
        clients[name] = _splits(path)
    return TextFolder(dict(sorted(clients.items())), *_kind([*chain(*files.values())]))


def _check_entries(folder: Path, entries: list[Path]) -> None:
    """Raise CoterieError if a folder contains a run file, unknown files, or one client's splits."""
    for path in entries:
        if path.suffix.lower() in (".yaml", ".yml"):
            raise CoterieError(
                f"{folder} already contains the run file {path.name}; run it with `coterie run "
                f"{path}`, or move it out of the folder."
            )
        if path.is_file() and path.stem in SPLITS:
            raise CoterieError(
                f"{path} is one split of a text, not the text of one client; put each client's "
                "splits into a folder of their own, such as anna/train.jsonl."
            )
    skipped = skipped_files(folder, str(folder))
    if others := {kind: count for kind, count in skipped.items() if kind != "hidden"}:
        raise CoterieError(
            f"{folder} contains files of unknown kinds ({listed(others)}); convert them to "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, or move them out of the folder."
        )


def _name(path: Path, number: int) -> str:
    """Return the name of a client that is derived from the name of its file or folder."""
    name = path.name if path.is_dir() else path.stem
    try:
        return client_name(name)
    except ValueError:
        return name_of_label(name, number)


def _splits(path: Path) -> dict[str, Path]:
    """Return a client's file or folder as `path`, or its splits if it contains nothing else."""
    if path.is_dir():
        parts = [part for part in sorted(path.iterdir()) if not part.name.startswith(".")]
        splits = {part.stem: part for part in parts}
        if "train" in splits and len(splits) == len(parts) and splits.keys() <= {*SPLITS}:
            return {split: splits[split] for split in SPLITS if split in splits}
    return {"path": path}


def _kind(files: list[Path]) -> tuple[str, dict[str, Any]]:
    """Return the kind of data of all files, and the keys of the section `data:` that select it."""
    kinds: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in files:
        kind, data = "plain text", {}
        if file.suffix.lower() != ".txt":
            record = next(read_records(file, str(file.parent)))
            fields = {name for name, value in record.fields.items() if value is not None}
            matching = [(kind, data) for kind, names, data in KINDS if names <= fields]
            if not matching:
                raise CoterieError(
                    f"{record.where} has the fields {', '.join(sorted(fields))}, which fit no "
                    "kind of data (text, messages, conversations, instruction and output, or "
                    "chosen and rejected); rename the fields, or write the run file yourself."
                )
            kind, data = matching[0]
        kinds.setdefault(kind, (file, data))
    if len(kinds) > 1:
        (kind, (file, _)), (other, (second, _)), *_ = kinds.items()
        raise CoterieError(
            f"{file} contains {kind} and {second} contains {other}, but a run has one kind of "
            "data; move the files of the other kind out of the folder."
        )
    [(kind, (_, data))] = kinds.items()
    return kind, data

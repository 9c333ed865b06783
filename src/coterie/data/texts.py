"""One client's texts or samples: what it reads from its own disk, and its three splits.

Nothing here looks at another client, so a client that joins late, or runs elsewhere, has the same
splits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from coterie.data.files import Record, find_files, read_records, read_text, resolve
from coterie.data.kinds.text import Text, pieces
from coterie.data.spec import PIECE, ClientSpec, DataSpec
from coterie.errors import CoterieError
from coterie.seeding import generator

SPLITS = ("train", "validation", "test")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Texts(Generic[Item]):
    """A client's documents (str), or its prompts with answers, conversations or preferences, split
    by split."""

    train: list[Item]
    validation: list[Item]
    test: list[Item]


def client_texts(spec: ClientSpec, data: DataSpec, root: Path, seed: int) -> Texts[Any]:
    """What a client reads from its own files; relative paths are taken from `root`.

    A split that is not given is set aside from `path` or `train` by `data.fractions`: records are
    dealt whole, .txt files in pieces, and what is adjacent in a file and falls into the same split
    stays together. With `data.instructions` and its kin, records become samples, and are
    all alike in length. Raises `CoterieError` if a file is missing or cannot be used.
    """
    owner = f"Client {spec.name}"
    given = {split: path for split in SPLITS[1:] if (path := getattr(spec, split)) is not None}
    source = spec.train if spec.path is None else spec.path
    assert source is not None, "ClientSpec makes sure of one of both"
    fractions = {split: part for split, part in data.fractions if split not in given}
    chance = generator(seed, "split", spec.name)
    if data.samples:
        sources = {"train": source, **given}
        records = {split: field_records(root, path, owner) for split, path in sources.items()}
        items = items_by_split(records, data)
        train = items["train"]
        return Texts(**items | set_aside(train, [1] * len(train), fractions, chance))
    documents = read_documents(root, source, data.fields, owner)
    texts = split_by_fractions(documents, fractions, chance)
    return Texts(**texts | {s: whole_text(path, data, root, owner) for s, path in given.items()})


def whole_text(path: str, data: DataSpec, root: Path, owner: str) -> list[Any]:
    """Return all documents or samples of a file or folder.

    Raises `CoterieError`, which begins with `owner`, if it cannot be read.
    """
    if data.samples:
        return list(data.bound.items(field_records(root, path, owner)))
    return ["".join(parts) for parts in read_documents(root, path, data.fields, owner)]


def read_documents(root: Path, source: str, fields: Sequence[str], owner: str) -> list[list[str]]:
    """The documents of a file or folder, each in parts that may be in different splits: every .txt
    file in pieces, and every record that is not blank, whole."""
    documents: list[list[str]] = []
    kind = Text(fields=[*fields])
    for file in find_files(resolve(root, source), owner):
        if file.suffix.lower() == ".txt":
            documents.append(list(pieces(read_text(file, owner), PIECE)))
        else:
            documents += [[text] for text in kind.items(read_records(file, owner))]
    return documents


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
    """Return the items of each split's records, which are read together.

    Choices of instructions that the run file does not give are found in all of them.
    """
    items = iter(data.bound.items(list(chain(*records.values()))))
    return {split: list(islice(items, len(part))) for split, part in records.items()}


def split_by_fractions(
    documents: Sequence[Iterable[str]], fractions: Mapping[str, float], chance: torch.Generator
) -> dict[str, list[str]]:
    """Set aside random parts of the documents, split name -> share, and leave the rest for "train".

    The shares are by characters and as near as whole pieces allow; the order within a split is that
    of the documents. A split that gets nothing is an empty list.
    """
    parts = [(number, part) for number, document in enumerate(documents) for part in document]
    splits = deal([len(part) for _, part in parts], fractions, chance)
    texts: dict[str, list[str]] = {split: [] for split in ("train", *fractions)}
    dealt = [(number, split, part) for (number, part), split in zip(parts, splits, strict=True)]
    for (_, split), run in groupby(dealt, key=lambda item: item[:2]):
        texts[split].append("".join(part for _, _, part in run))
    return texts


def set_aside(
    items: Sequence[Item],
    lengths: Sequence[int],
    fractions: Mapping[str, float],
    chance: torch.Generator,
) -> dict[str, list[Item]]:
    """Items of these lengths by split, in their order: random parts, and "train" with the rest."""
    splits: dict[str, list[Item]] = {split: [] for split in ("train", *fractions)}
    for item, split in zip(items, deal(lengths, fractions, chance), strict=True):
        splits[split].append(item)
    return splits


def deal(
    lengths: Sequence[int], fractions: Mapping[str, float], chance: torch.Generator
) -> list[str]:
    """The split of each piece, by its length and the splits' fractions; the rest are for "train".

    In random order, a piece is set aside if that brings a split nearer to its share.
    """
    splits = ["train"] * len(lengths)
    order: list[int] = torch.randperm(len(lengths), generator=chance).tolist()
    for split, fraction in fractions.items():
        missing = fraction * sum(lengths)
        for piece in order:
            if splits[piece] == "train" and abs(missing - lengths[piece]) < abs(missing):
                splits[piece] = split
                missing -= lengths[piece]
    return splits

"""Reading of a client's texts or samples, and their division into training and held-out splits.

A client's splits do not depend on other clients, so a client that joins late, or runs on another
machine, has the same splits.
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
    """A client's three splits, each a list of documents (str) or of items, such as instructions."""

    train: list[Item]
    validation: list[Item]
    test: list[Item]


def client_texts(spec: ClientSpec, data: DataSpec, root: Path, seed: int) -> Texts[Any]:
    """Read a client's files and divide them into splits.

    The texts from the client's key `path` or `train` form the training split. If the client has no
    key `validation`, a random fraction of these texts forms the validation split instead, and is
    not used for training. The test split is formed in the same way if there is no key `test`. The
    fractions are set in `data.fractions`. For plain text, a fraction refers to the number of
    characters. For other kinds of data, it refers to the number of samples. A record is never
    divided between splits. A .txt file is divided into pieces. Adjacent pieces that are assigned to
    the same split are joined again.

    Args:
        spec: The client's entry in the run file.
        data: The run file's section `data:`.
        root: The folder to which relative paths refer.
        seed: The run's seed.

    Raises:
        CoterieError: A file is missing or invalid.
    """
    owner = f"Client {spec.name}"
    paths = {split: path for split in SPLITS[1:] if (path := getattr(spec, split)) is not None}
    source = spec.train if spec.path is None else spec.path
    assert source is not None, "the client has neither path nor train"
    fractions = {split: part for split, part in data.fractions if split not in paths}
    chance = generator(seed, "split", spec.name)
    if data.samples:
        sources = {"train": source, **paths}
        records = {split: field_records(root, path, owner) for split, path in sources.items()}
        items = items_by_split(records, data)
        train = items["train"]
        return Texts(**items | set_aside(train, [1] * len(train), fractions, chance))
    documents = read_documents(root, source, data.fields, owner)
    texts = split_by_fractions(documents, fractions, chance)
    return Texts(**texts | {s: whole_text(path, data, root, owner) for s, path in paths.items()})


def whole_text(path: str, data: DataSpec, root: Path, owner: str) -> list[Any]:
    """Read all documents or samples of a file or folder.

    Raises:
        CoterieError: The path cannot be read. The message begins with `owner`.
    """
    if data.samples:
        return list(data.bound.items(field_records(root, path, owner)))
    return ["".join(parts) for parts in read_documents(root, path, data.fields, owner)]


def read_documents(root: Path, source: str, fields: Sequence[str], owner: str) -> list[list[str]]:
    """Read the documents of a file or folder, each as a list of parts.

    The parts of a document can be assigned to different splits. A .txt file is a document with
    several parts. A non-blank record is a document with one part.
    """
    documents: list[list[str]] = []
    kind = Text(fields=[*fields])
    for file in find_files(resolve(root, source), owner):
        if file.suffix.lower() == ".txt":
            documents.append(list(pieces(read_text(file, owner), PIECE)))
        else:
            documents += [[text] for text in kind.items(read_records(file, owner))]
    return documents


def field_records(root: Path, source: str, owner: str) -> list[Record]:
    """Read the records of a file or folder, and refuse .txt files, which have no fields."""
    files = find_files(resolve(root, source), owner)
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"{owner}: {file} is plain text without fields; convert it to .jsonl or .parquet "
                "records, or remove the key that sets the kind of data, such as data.instructions."
            )
    return [record for file in files for record in read_records(file, owner)]


def items_by_split(records: Mapping[str, Sequence[Record]], data: DataSpec) -> dict[str, list[Any]]:
    """Convert the records of all splits to items, and return the items of each split.

    The splits must be converted together: by default, the choices of a multiple-choice question are
    collected from the answers in the records of all splits.
    """
    items = iter(data.bound.items(list(chain(*records.values()))))
    return {split: list(islice(items, len(part))) for split, part in records.items()}


def split_by_fractions(
    documents: Sequence[Iterable[str]], fractions: Mapping[str, float], chance: torch.Generator
) -> dict[str, list[str]]:
    """Set aside random parts of documents for some splits, and assign the rest to "train".

    Args:
        documents: The parts of each document.
        fractions: The fraction of all characters to set aside for each split. Because parts are
            not divided, the fractions are met only as closely as whole parts allow.
        chance: The generator of the random order.

    Returns:
        The texts of each split, in the order of the documents. Adjacent parts of a document that
        are in the same split are joined.
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
    """Set aside random items for some splits, and assign the rest to "train".

    Args:
        items: The items.
        lengths: The length of each item.
        fractions: The fraction of the total length to set aside for each split.
        chance: The generator of the random order.

    Returns:
        The items of each split. Within a split, the items have the same order as in `items`.
    """
    splits: dict[str, list[Item]] = {split: [] for split in ("train", *fractions)}
    for item, split in zip(items, deal(lengths, fractions, chance), strict=True):
        splits[split].append(item)
    return splits


def deal(
    lengths: Sequence[int], fractions: Mapping[str, float], chance: torch.Generator
) -> list[str]:
    """Assign pieces to splits at random.

    For each split in turn, the unassigned pieces are considered in random order. A piece is
    assigned to the split if this brings the split's total length closer to the split's fraction.
    The remaining pieces are assigned to "train".

    Args:
        lengths: The length of each piece.
        fractions: The fraction of the total length for each split.
        chance: The generator of the random order.

    Returns:
        The split of each piece.
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

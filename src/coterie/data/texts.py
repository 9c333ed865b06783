"""One client's texts or samples: what it reads from its own disk, and its three splits.

Nothing here looks at another client, so a client that joins late, or runs elsewhere, has the same
splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from coterie.data.files import Document, read_documents
from coterie.data.kinds.text import parts_of
from coterie.data.records import field_records, items_by_split, items_of
from coterie.data.spec import PIECE, ClientSpec, DataSpec
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
    for split, path in given.items():
        texts[split] = [d.text for d in read_documents(root, path, data.fields, owner)]
    return Texts(**texts)


def whole_text(path: str, data: DataSpec, root: Path, owner: str) -> list[Any]:
    """Return all documents or samples of a file or folder.

    Raises `CoterieError`, which begins with `owner`, if it cannot be read.
    """
    if data.samples:
        return list(items_of(field_records(root, path, owner), data))
    return [document.text for document in read_documents(root, path, data.fields, owner)]


def split_by_fractions(
    documents: Sequence[Document], fractions: Mapping[str, float], chance: torch.Generator
) -> dict[str, list[str]]:
    """Set aside random parts of the documents, split name -> share, and leave the rest for "train".

    The shares are by characters and as near as whole pieces allow; the order within a split is that
    of the documents. A split that gets nothing is an empty list.
    """
    parts = [
        (number, part)
        for number, document in enumerate(documents)
        for part in parts_of(document, PIECE)
    ]
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

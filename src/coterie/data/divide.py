"""One labelled data set divided among clients: by label, by Dirichlet shares, or as mixtures.

All chance lies in one shuffle of the records, the Dirichlet shares, and each client's split by
fractions; a part "at random" is the first so many of the shuffled records.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from unicodedata import normalize

import numpy
import torch

from coterie.chance import generator
from coterie.data.files import Document, Record, find_files, read_records, resolve
from coterie.data.hub import read_hub
from coterie.data.spec import DataSpec, DivideSpec, Fractions
from coterie.data.texts import Texts, split_by_fractions
from coterie.errors import CoterieError

MINIMUM = 10
"""Records that every client has at least after a Dirichlet division."""
DRAWS = 1000
"""Dirichlet draws before giving up."""

Pools = dict[str, list[int]]
"""For each label, the numbers of the records that have it, in shuffled order."""


def divided_texts(spec: DivideSpec, data: DataSpec, root: Path, seed: int) -> dict[str, Texts]:
    """Divide one data set among clients: client name -> its texts.

    By label or mixture there is a client for every label, named after it; by Dirichlet they are
    client-1, client-2, ... No record is used twice. Raises `CoterieError` if the data set cannot be
    read or does not suffice.
    """
    records = _labelled_texts(spec, data, root)
    order = torch.randperm(len(records), generator=generator(seed, "divide", "order"))
    records = [records[i] for i in order.tolist()]
    pools: Pools = {label: [] for label in sorted({label for label, _ in records})}
    for number, (label, _) in enumerate(records):
        pools[label].append(number)
    names = _client_names(spec, list(pools))
    held: dict[str, list[list[int]]] = {}
    if spec.held_out == "uniform":
        held = _hold_out_uniform(pools, len(names), data.fractions)
    train = _divide(spec, pools, seed)

    def texts(numbers: list[int]) -> list[str]:
        return [records[number][1] for number in sorted(numbers)]

    divided: dict[str, Texts] = {}
    for client, name in enumerate(names):
        own = texts(train[client])
        if held:
            splits = {split: texts(parts[client]) for split, parts in held.items()}
            divided[name] = Texts(train=own, **splits)
        else:
            documents = [Document(text, divisible=False) for text in own]
            chance = generator(seed, "split", name)
            divided[name] = Texts(**split_by_fractions(documents, dict(data.fractions), chance))
    return divided


def _labelled_texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[tuple[str, str]]:
    """The label and the text of every record that is not blank, in the source's order."""
    labelled = [
        (_label(record, spec.label), text)
        for record in _records(spec, root)
        if (text := record.text(data.fields)).strip()
    ]
    if not labelled:
        raise CoterieError(
            f"divide: the records of {spec.source} hold no text; name another field."
        )
    return labelled


def _records(spec: DivideSpec, root: Path) -> list[Record]:
    path = resolve(root, spec.source)
    if not path.exists():
        return read_hub(spec.source, spec.subset, spec.split, spec.label, root)
    files = find_files(path, "divide")
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"divide: {file} is plain text, which has no labels to divide by; give .jsonl or"
                " .parquet records, or list clients instead."
            )
    return [record for file in files for record in read_records(file, "divide")]


def _label(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str | int) or value == "":
        raise CoterieError(
            f"{record.where}: field {field} holds {value!r} rather than a label (a text or a whole"
            " number); mend the record or set divide.label."
        )
    return str(value)


def _client_names(spec: DivideSpec, labels: Sequence[str]) -> list[str]:
    """For Dirichlet client-1, ...; otherwise the labels made names, "Sci/Tech" -> sci-tech."""
    if spec.clients is not None:
        return [f"client-{number}" for number in range(1, spec.clients + 1)]
    names: dict[str, str] = {}
    for number, label in enumerate(labels, start=1):
        ascii_label = normalize("NFKD", label).encode("ascii", "ignore").decode().lower()
        name = re.sub(r"[^a-z0-9._]+", "-", ascii_label)[:64].strip(".-") or f"label-{number}"
        if name in names:
            raise CoterieError(
                f"divide: the labels {names[name]!r} and {label!r} would both be client {name};"
                " rename one."
            )
        names[name] = label
    return list(names)


def _hold_out_uniform(
    pools: Pools, clients: int, fractions: Fractions
) -> dict[str, list[list[int]]]:
    """Take each client's validation and test out of the pools, the same number of every label.

    Returns split -> for each client, its records' numbers. The fractions are of all records.
    """
    records = sum(len(pool) for pool in pools.values())
    held: dict[str, list[list[int]]] = {}
    for split, fraction in fractions:
        each = int(fraction * records / (len(pools) * clients))
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label, pool in pools.items():
            if not 0 < each * clients < len(pool):
                raise CoterieError(
                    f"divide: held_out uniform would take {each} records of label {label} for the"
                    f" {split} text of each of {clients} clients, and {len(pool)} are left of it;"
                    " change data.fractions, or set divide.held_out to own."
                )
            for part in parts:
                part += pool[:each]
                del pool[:each]
        held[split] = parts
    return held


def _divide(spec: DivideSpec, pools: Pools, seed: int) -> list[list[int]]:
    """For each client the numbers of its records."""
    if spec.by == "label":
        return list(pools.values())
    if spec.by == "mixture":
        assert spec.share is not None, "DivideSpec makes sure of it"
        return _by_mixture(pools, spec.share)
    assert spec.clients is not None, "DivideSpec makes sure of it"
    assert spec.alpha is not None, "DivideSpec makes sure of it"
    return _by_dirichlet(pools, spec.clients, spec.alpha, seed)


def _by_dirichlet(pools: Pools, clients: int, alpha: float, seed: int) -> list[list[int]]:
    """Deal each label's records to the clients by shares drawn from Dirichlet(alpha, ..., alpha).

    All shares are drawn again until every client has 10 records.
    """
    chance = generator(seed, "divide", "dirichlet")
    draw = numpy.random.default_rng(int(torch.randint(2**62, (), generator=chance)))
    for _ in range(DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for pool in pools.values():
            ends = draw.dirichlet([alpha] * clients).cumsum()[:-1] * len(pool)
            for part, share in zip(parts, numpy.split(pool, ends.round().astype(int)), strict=True):
                part += share.tolist()
        if min(len(part) for part in parts) >= MINIMUM:
            return parts
    records = sum(len(pool) for pool in pools.values())
    raise CoterieError(
        f"divide: in {DRAWS} draws with alpha {alpha}, {records} records never gave each of"
        f" {clients} clients {MINIMUM}; raise divide.alpha, lower divide.clients, or give more"
        " records."
    )


def _by_mixture(pools: Pools, own_share: float) -> list[list[int]]:
    """Give each label's client `own_share` of that label and the rest evenly of the others.

    All clients are of one size. As each label is asked for as many records as a client has, the
    rarest label sets that size.
    """
    if len(pools) == 1:
        raise CoterieError("divide: a mixture needs two labels, and there is only one.")
    size = min(len(pool) for pool in pools.values())
    own = round(own_share * size)
    other = (size - own) // (len(pools) - 1)
    parts: list[list[int]] = [[] for _ in pools]
    for label, pool in enumerate(pools.values()):
        start = 0
        for client, part in enumerate(parts):
            count = own if client == label else other
            part += pool[start : start + count]
            start += count
    return parts

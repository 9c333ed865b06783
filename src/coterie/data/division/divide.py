"""Division of one data set among clients: by label, by Dirichlet shares, by mixtures, or evenly.

Three steps are random: shuffling the records of each split, drawing Dirichlet shares, and splitting
each client's text by fractions. All other steps take the shuffled records in order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch

from coterie.data.division.labelled import Labelled, labelled
from coterie.data.division.mixtures import Pools, client_mixtures, largest_size, take
from coterie.data.division.spec import DivideSpec
from coterie.data.spec import DataSpec
from coterie.data.texts import Texts, set_aside
from coterie.errors import CoterieError
from coterie.names import name_of_label
from coterie.seeding import generator

MINIMUM = 10
"""The minimum number of records per client in a Dirichlet division."""
DRAWS = 1000
"""The maximum number of Dirichlet draws before the division fails."""


class Division(dict[str, Texts[Any]]):
    """A divided data set: a mapping of each client's name to the client's texts."""

    def __init__(
        self,
        texts: Mapping[str, Texts[Any]],
        labels: dict[str, dict[str, int]],
        public: Texts[Any] | None = None,
    ) -> None:
        super().__init__(texts)
        self.labels = labels
        """The number of training records of each client (outer key) with each label (inner key).

        The mapping is empty for an even division, and if clients have files of their own.
        """
        self.public = public
        """The public set, or None if the run file sets none aside.

        The records are in the split `train`. The splits `validation` and `test` are empty, except
        in an even division.
        """


Records = Sequence[Labelled]


def divided_texts(spec: DivideSpec, data: DataSpec, root: Path, seed: int) -> Division:
    """Divide a data set among clients; see `divided_records`.

    Returns:
        The texts, or other items, and the label counts of each client, and the public set.
    """
    division = divided_records(spec, data, root, seed)
    texts = {client: _items(parts) for client, parts in division.items()}
    public = None if division.public is None else _items(division.public)
    return Division(texts, division.labels, public)


def _items(parts: Texts[Labelled]) -> Texts[Any]:
    return Texts(*([record.item for record in split] for split in vars(parts).values()))


def divided_records(spec: DivideSpec, data: DataSpec, root: Path, seed: int) -> Division:
    """Divide the records of a data set among clients.

    With `by: label` or `by: mixture`, there is one client per label, named after the label. With
    `by: even` or `by: dirichlet`, the clients are named client-1, client-2, and so on. With
    `by: mixtures`, the run file sets each client's name and label shares. In plain text, shares are
    fractions of the client's characters; in other data, they are fractions of the client's samples.
    No record is used twice, except that all clients of an even division have the same validation
    and test splits. In other divisions, the data set's own validation and test splits are divided
    label by label, in proportion to clients' training records, or equally (`held_out: uniform`).

    Args:
        spec: The run file's section `divide:`.
        data: The run file's section `data:`.
        root: The folder to which relative paths refer.
        seed: The run's seed.

    Returns:
        The records and the label counts of each client, and the public set. All items are of the
        class `Labelled`.

    Raises:
        CoterieError: The data set cannot be read or is too small.
    """
    by_split = labelled(spec, data, root)
    records = _shuffled(by_split.pop("train"), seed, "order")
    predefined = {split: _shuffled(given, seed, split) for split, given in by_split.items()}
    fractions = {split: share for split, share in data.fractions if split not in predefined}
    if spec.by == "even":
        return _divide_evenly(spec, records, fractions, predefined)
    lengths = [len(r.item) if isinstance(r.item, str) else 1 for r in records]
    pools = _pools(records)
    names = names_of_clients(spec, list(pools))
    public = [records[number] for number in _take_public(spec, pools, lengths)]
    held: dict[str, list[list[int]]] = {}
    if spec.held_out == "uniform":
        held = _hold_out_uniform(pools, len(names), fractions)
    if spec.mixtures is None:
        train = [_alternating(part, records) for part in _divide(spec, pools, seed)]
    else:
        mixtures = client_mixtures(spec.mixtures, pools)
        if not held:
            size = largest_size(pools, mixtures, lengths)
            held = {s: take(pools, mixtures, lengths, size * f) for s, f in fractions.items()}
        train = take(pools, mixtures, lengths, largest_size(pools, mixtures, lengths))
    divided = {
        split: _divide_split(spec, part, train, records) for split, part in predefined.items()
    }

    texts: dict[str, Texts[Any]] = {}
    labels: dict[str, dict[str, int]] = {}
    for client, name in enumerate(names):
        splits = {"train": train[client]} | {split: parts[client] for split, parts in held.items()}
        if not held:
            chance = generator(seed, "split", name)
            sizes = [lengths[number] for number in train[client]]
            splits = set_aside(train[client], sizes, fractions, chance)
        parts = {split: [records[n] for n in numbers] for split, numbers in splits.items()}
        texts[name] = Texts(**parts | {split: given[client] for split, given in divided.items()})
        labels[name] = dict(sorted(Counter(record.label for record in parts["train"]).items()))
    return Division(texts, labels, Texts(public, [], []) if public else None)


def _shuffled(records: Records, seed: int, purpose: str) -> Records:
    order = torch.randperm(len(records), generator=generator(seed, "divide", purpose))
    return [records[i] for i in order.tolist()]


def _pools(records: Records) -> Pools:
    """Return a mapping from each label, in sorted order, to the indices of its records."""
    pools: Pools = {label: [] for label in sorted({record.label for record in records})}
    for number, record in enumerate(records):
        pools[record.label].append(number)
    return pools


def _take_public(spec: DivideSpec, pools: Pools, lengths: list[int]) -> list[int]:
    """Take a public set from the pools; its label shares equal those of all clients together."""
    if not spec.public:
        return []
    mixtures: list[Mapping[str, float]]
    if spec.mixtures is not None:
        mixtures = client_mixtures(spec.mixtures, pools)
    elif spec.by == "mixture":  # all clients together have equal shares of all labels
        mixtures = [dict.fromkeys(pools, 1 / len(pools))]
    else:
        sizes = {label: sum(lengths[number] for number in pool) for label, pool in pools.items()}
        mixtures = [{label: size / sum(sizes.values()) for label, size in sizes.items()}]
    size = spec.public * largest_size(pools, mixtures, lengths) * len(mixtures)
    means = {label: sum(m.get(label, 0) for m in mixtures) / len(mixtures) for label in pools}
    [part] = take(pools, [means], lengths, size)
    return part


def _divide_split(
    spec: DivideSpec, given: Records, train: list[list[int]], records: Records
) -> list[list[Labelled]]:
    """Divide a validation or test split of the data set among the clients.

    With `held_out: own`, a client that has, for example, 30 % of a label's training records also
    receives 30 % of that label's records in this split. Labels without training records are left
    out. With `held_out: uniform`, all clients receive equal shares.

    Args:
        spec: The run file's section `divide:`.
        given: The labelled records of the split to divide.
        train: The indices of each client's training records.
        records: The labelled training records, to which the indices in `train` refer.

    Returns:
        For each client, the records of the split that the client receives.
    """
    counts = [Counter(records[number].label for number in part) for part in train]
    parts: list[list[int]] = [[] for _ in train]
    for label, pool in _pools(given).items():
        shares = [count[label] if spec.held_out == "own" else 1 for count in counts]
        if any(shares):
            ends = numpy.rint(numpy.cumsum(shares)[:-1] / sum(shares) * len(pool)).astype(int)
            for part, dealt in zip(parts, numpy.split(pool, ends), strict=True):
                part += dealt.tolist()
    return [[given[number] for number in _alternating(part, given)] for part in parts]


def _divide_evenly(
    spec: DivideSpec,
    records: Records,
    fractions: Mapping[str, float],
    predefined: Mapping[str, Records],
) -> Division:
    """Divide the shuffled records into equal parts for the clients and the public set.

    Each client receives one part, and so does the public set if there is one. Further parts (see
    `divide.parts`) and leftover records are unused. As in FedMKT, all clients have the same
    validation split and the same test split. These are the splits in `predefined`. For a split that
    is missing there, a fraction of all records is set aside before the division.
    """
    rest = list(records)
    held = {split: list(given) for split, given in predefined.items()}
    for split, fraction in fractions.items():
        count = int(fraction * len(records))
        held[split], rest = rest[:count], rest[count:]
    parts = spec.parts or spec.taken
    size = len(rest) // parts
    if not size or not all(held.values()):
        raise CoterieError(
            f"divide: {len(records)} records are too few for {parts} equal parts; each part, and "
            "each split that data.fractions sets aside first, needs at least 1 record. Add "
            "records, or lower divide.clients or divide.parts."
        )
    dealt = [Texts(rest[n * size : (n + 1) * size], **held) for n in range(spec.taken)]
    public = dealt.pop() if spec.public else None
    return Division(dict(zip(names_of_clients(spec, []), dealt, strict=True)), {}, public)


def _alternating(part: Sequence[int], records: Records) -> list[int]:
    """Order a client's records so that labels alternate in proportion to their shares.

    If a limit later truncates the client's text, the text's label shares hardly change.
    """
    totals = Counter(records[number].label for number in part)
    counts: Counter[str] = Counter()
    places = []
    for number in sorted(part):
        label = records[number].label
        counts[label] += 1
        places.append((counts[label] / totals[label], number))
    return [number for _, number in sorted(places)]


def names_of_clients(spec: DivideSpec, labels: Sequence[str]) -> list[str]:
    """Return the clients' names: from the run file, numbered (client-1), or derived from labels.

    For example, the client of the label A/B has the name a-b.
    """
    if spec.mixtures is not None:
        return sorted(spec.mixtures)
    if spec.clients is not None:
        return [f"client-{number}" for number in range(1, spec.clients + 1)]
    names: dict[str, str] = {}
    for number, label in enumerate(labels, start=1):
        name = name_of_label(label, number)
        if name in names:
            raise CoterieError(
                f"divide: the labels {names[name]!r} and {label!r} both give the client name "
                f"{name}; rename one of them."
            )
        names[name] = label
    return list(names)


def _hold_out_uniform(
    pools: Pools, clients: int, fractions: Mapping[str, float]
) -> dict[str, list[list[int]]]:
    """Take each client's validation and test records from the pools, and return their indices.

    Within a split, every client receives the same number of records of every label. The values of
    `fractions` are fractions of all records in the pools.
    """
    records = sum(len(pool) for pool in pools.values())
    held: dict[str, list[list[int]]] = {}
    for split, fraction in fractions.items():
        each = int(fraction * records / (len(pools) * clients))
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label, pool in pools.items():
            if not 0 < each * clients < len(pool):
                raise CoterieError(
                    f"divide: `held_out: uniform` takes {each} records with the label {label} for "
                    f"the {split} text of each of {clients} clients; it must take 1 or more, and "
                    f"fewer than all {len(pool)} in total; change data.fractions or held_out."
                )
            for part in parts:
                part += pool[:each]
                del pool[:each]
        held[split] = [sorted(part) for part in parts]
    return held


def _divide(spec: DivideSpec, pools: Pools, seed: int) -> list[list[int]]:
    """Divide the records of the pools, and return the indices of each client's records."""
    if spec.by == "label":
        return list(pools.values())
    if spec.by == "mixture":
        assert spec.share is not None, "divide.share is not set"
        return _by_mixture(pools, spec.share)
    assert spec.clients is not None, "divide.clients is not set"
    assert spec.alpha is not None, "divide.alpha is not set"
    return _by_dirichlet(pools, spec.clients, spec.alpha, spec.balanced, seed)


def _by_dirichlet(
    pools: Pools, clients: int, alpha: float, balanced: bool, seed: int
) -> list[list[int]]:
    """Divide each label's records into shares that are drawn from Dirichlet(alpha, ..., alpha).

    All shares are drawn again until every client has at least `MINIMUM` records.

    Args:
        pools: The record indices of each label.
        clients: The number of clients.
        alpha: The concentration of the Dirichlet distribution.
        balanced: Whether a client that already has an even share of all records (records / clients)
            receives no records of further labels, as in FedAMoLE.
        seed: The run's seed.

    Raises:
        CoterieError: No draw gives every client enough records.
    """
    chance = generator(seed, "divide", "dirichlet")
    draw = numpy.random.default_rng(int(torch.randint(2**62, (), generator=chance)))
    records = sum(len(pool) for pool in pools.values())
    for _ in range(DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for pool in pools.values():
            # FedAMoLE sets the shares of the other clients to zero and renormalises, which also
            # gives Dirichlet shares. At least one client is open: if all had their even share, no
            # record would be left.
            open_parts = [p for p in parts if not balanced or len(p) * clients < records]
            ends = draw.dirichlet([alpha] * len(open_parts)).cumsum()[:-1] * len(pool)
            shares = numpy.split(pool, ends.round().astype(int))
            for part, share in zip(open_parts, shares, strict=True):
                part += share.tolist()
        if min(len(part) for part in parts) >= MINIMUM:
            return parts
    raise CoterieError(
        f"divide: {DRAWS} draws with alpha {alpha} never gave each of {clients} clients "
        f"at least {MINIMUM} of the {records} records; raise divide.alpha, lower divide.clients, "
        "or add records."
    )


def _by_mixture(pools: Pools, own_share: float) -> list[list[int]]:
    """Divide the records so that each client's text is mostly of one label.

    There is one client per label. A fraction `own_share` of a client's records has this label. The
    other labels have equal shares of the remaining records. If the rarest label has n records, each
    client receives about n records, and all clients together use about n records of each label.
    """
    if len(pools) == 1:
        raise CoterieError("divide: a mixture needs at least two labels, but there is only one.")
    size = min(len(pool) for pool in pools.values())
    own = round(own_share * size)
    other = (size - own) // (len(pools) - 1)
    parts: list[list[int]] = [[] for _ in pools]
    for label, pool in enumerate(pools.values()):
        left = iter(pool)
        for client, part in enumerate(parts):
            part += islice(left, own if client == label else other)
    return parts

"""Texts or instructions divided among clients: by label, Dirichlet shares, mixtures, or evenly.

All chance lies in one shuffle of the records of each split, the Dirichlet shares, and each client's
split by fractions; a part "at random" is the first so many of the shuffled records.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy
import torch

from coterie.data.divide_spec import DivideSpec
from coterie.data.labelled import labelled
from coterie.data.spec import DataSpec
from coterie.data.texts import Texts, set_aside
from coterie.errors import CoterieError
from coterie.seeding import generator

MINIMUM = 10
"""Records that every client has at least after a Dirichlet division."""
DRAWS = 1000
"""Dirichlet draws before giving up."""


class Division(dict[str, Texts[Any]]):
    """Client name -> its texts."""

    def __init__(
        self,
        texts: Mapping[str, Texts[Any]],
        labels: dict[str, dict[str, int]],
        public: Texts[Any] | None = None,
    ) -> None:
        super().__init__(texts)
        self.labels = labels
        """Client name -> label -> how many records of its training text have it; empty if
        even, or where clients have files of their own."""
        self.public = public
        """What everybody may see, where a part was kept for it: its records are `train`. Held-out
        records it has if even."""


Pools = dict[str, list[int]]
"""For each label, the numbers of the records that have it, in shuffled order."""


Records = list[tuple[str, Any]]
"""A label, and a text or an instruction."""


def divided_texts(spec: DivideSpec, data: DataSpec, root: Path, seed: int) -> Division:
    """Divide texts, or instructions, among clients: client name -> its texts.

    By label or mixture there is a client for every label, named after it; by Dirichlet or evenly
    they are client-1, client-2, ...; by given mixtures they have names of their own. No record is
    used twice, but evenly all clients have the same validation and test. Shares are of a text's
    characters, or of samples. Splits that the data set has of its own are dealt like the training
    text. Raises `CoterieError` if the data set cannot be read or does not suffice.
    """
    found = labelled(spec, data, root)
    records = _shuffled(found.pop("train"), seed, "order")
    own = {split: _shuffled(given, seed, split) for split, given in found.items()}
    fractions = {split: share for split, share in data.fractions if split not in own}
    if spec.by == "even":
        return _evenly(spec, records, fractions, own)
    lengths = [len(item) if isinstance(item, str) else 1 for _, item in records]
    pools = _pools(records)
    names = _client_names(spec, list(pools))
    public = [records[number][1] for number in _take_public(spec, pools, lengths)]
    held: dict[str, list[list[int]]] = {}
    if spec.held_out == "uniform":
        held = _hold_out_uniform(pools, len(names), fractions)
    if spec.mixtures is None:
        train = [_alternating(part, records) for part in _divide(spec, pools, seed)]
    else:
        asked = _asked(spec.mixtures, pools)
        if not held:
            size = _most(pools, asked, lengths)
            held = {s: _take(pools, asked, lengths, size * f) for s, f in fractions.items()}
        train = _take(pools, asked, lengths, _most(pools, asked, lengths))
    given = {split: _dealt_alike(spec, part, train, records) for split, part in own.items()}

    texts: dict[str, Texts[Any]] = {}
    labels: dict[str, dict[str, int]] = {}
    for client, name in enumerate(names):
        splits = {"train": train[client]} | {split: parts[client] for split, parts in held.items()}
        if not held:
            chance = generator(seed, "split", name)
            sizes = [lengths[number] for number in train[client]]
            splits = set_aside(train[client], sizes, fractions, chance)
        items = {split: [records[n][1] for n in numbers] for split, numbers in splits.items()}
        texts[name] = Texts(**items | {split: parts[client] for split, parts in given.items()})
        labels[name] = dict(sorted(Counter(records[n][0] for n in splits["train"]).items()))
    return Division(texts, labels, Texts(public, [], []) if public else None)


def _shuffled(records: Records, seed: int, purpose: str) -> Records:
    order = torch.randperm(len(records), generator=generator(seed, "divide", purpose))
    return [records[i] for i in order.tolist()]


def _pools(records: Records) -> Pools:
    """Return the pools of all records, in the order of their labels."""
    pools: Pools = {label: [] for label in sorted({label for label, _ in records})}
    for number, (label, _) in enumerate(records):
        pools[label].append(number)
    return pools


def _take_public(spec: DivideSpec, pools: Pools, lengths: list[int]) -> list[int]:
    """Take the public set's records out of the pools, in the mix of labels of all clients."""
    if not spec.public:
        return []
    mixtures: list[Mapping[str, float]]
    if spec.mixtures is not None:
        mixtures = _asked(spec.mixtures, pools)
    elif spec.by == "mixture":  # all clients together have as much of each label
        mixtures = [dict.fromkeys(pools, 1 / len(pools))]
    else:
        sizes = {label: sum(lengths[number] for number in pool) for label, pool in pools.items()}
        mixtures = [{label: size / sum(sizes.values()) for label, size in sizes.items()}]
    size = spec.public * _most(pools, mixtures, lengths) * len(mixtures)
    every = {label: sum(m.get(label, 0) for m in mixtures) / len(mixtures) for label in pools}
    [part] = _take(pools, [every], lengths, size)
    return part


def _dealt_alike(
    spec: DivideSpec, given: Records, train: list[list[int]], records: Records
) -> list[list[Any]]:
    """Each client's part of a split that the data set has of its own.

    Of each label it has the share that it has of the training records, or with `held_out: uniform`
    an equal one; what nobody trains on is left out.
    """
    counts = [Counter(records[number][0] for number in part) for part in train]
    parts: list[list[int]] = [[] for _ in train]
    for label, pool in _pools(given).items():
        shares = [count[label] if spec.held_out == "own" else 1 for count in counts]
        if any(shares):
            ends = numpy.rint(numpy.cumsum(shares)[:-1] / sum(shares) * len(pool)).astype(int)
            for part, dealt in zip(parts, numpy.split(pool, ends), strict=True):
                part += dealt.tolist()
    return [[given[number][1] for number in _alternating(part, given)] for part in parts]


def _evenly(
    spec: DivideSpec, records: Records, fractions: Mapping[str, float], own: Mapping[str, Records]
) -> Division:
    """Deal shuffled items in parts of one size: one per client and, if asked for, a public one;
    with more `parts` than that, the others are unused.

    Validation and test are the data set's `own`, or fractions of all items, set aside first. They
    are everybody's, as FedMKT scores all models alike. Fewer items than there are parts are left
    over, unused.
    """
    items = [item for _, item in records]
    held = {split: [item for _, item in given] for split, given in own.items()}
    for split, fraction in fractions.items():
        count = int(fraction * len(records))
        held[split], items = items[:count], items[count:]
    parts = spec.parts or spec.taken
    size = len(items) // parts
    if not size or not all(held.values()):
        raise CoterieError(
            f"divide: {len(records)} records are too few for {parts} parts with the validation "
            "and test splits of data.fractions; add records, or lower divide.clients or "
            "divide.parts."
        )
    dealt = [Texts(items[n * size : (n + 1) * size], **held) for n in range(spec.taken)]
    public = dealt.pop() if spec.public else None
    return Division(dict(zip(_client_names(spec, []), dealt, strict=True)), {}, public)


def _alternating(part: Sequence[int], records: Sequence[tuple[str, Any]]) -> list[int]:
    """A client's records with labels taking turns by their shares.

    So the start of its text, which is what a limit keeps, has the shares of the whole.
    """
    counts = Counter(records[number][0] for number in part)
    seen: Counter[str] = Counter()
    places = []
    for number in sorted(part):
        label = records[number][0]
        seen[label] += 1
        places.append((seen[label] / counts[label], number))
    return [number for _, number in sorted(places)]


def _client_names(spec: DivideSpec, labels: Sequence[str]) -> list[str]:
    """The names given, or client-1, ..., or the labels made names, "Sci/Tech" -> sci-tech."""
    if spec.mixtures is not None:
        return sorted(spec.mixtures)
    if spec.clients is not None:
        return [f"client-{number}" for number in range(1, spec.clients + 1)]
    names: dict[str, str] = {}
    for number, label in enumerate(labels, start=1):
        signed = re.sub(r"^-(?=\d)", "minus-", label)
        ascii_label = normalize("NFKD", signed).encode("ascii", "ignore").decode().lower()
        name = re.sub(r"[^a-z0-9._]+", "-", ascii_label)[:64].strip(".-") or f"label-{number}"
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
    """Take each client's validation and test out of the pools, the same number of every label.

    Returns split -> for each client, its records' numbers. The fractions are of all records.
    """
    records = sum(len(pool) for pool in pools.values())
    held: dict[str, list[list[int]]] = {}
    for split, fraction in fractions.items():
        each = int(fraction * records / (len(pools) * clients))
        parts: list[list[int]] = [[] for _ in range(clients)]
        for label, pool in pools.items():
            if not 0 < each * clients < len(pool):
                raise CoterieError(
                    f"divide: held_out uniform needs {each} records of label {label} for the "
                    f"{split} text of each of {clients} clients, and {len(pool)} are left; "
                    "change data.fractions, or set divide.held_out to own."
                )
            for part in parts:
                part += pool[:each]
                del pool[:each]
        held[split] = [sorted(part) for part in parts]
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
    return _by_dirichlet(pools, spec.clients, spec.alpha, spec.balanced, seed)


def _by_dirichlet(
    pools: Pools, clients: int, alpha: float, balanced: bool, seed: int
) -> list[list[int]]:
    """Deal each label's records to the clients by shares drawn from Dirichlet(alpha, ..., alpha).

    Balanced as FedAMoLE's clients are: one that holds its even part of all records, or more, gets
    none of the labels that follow. All shares are drawn again until every client has 10 records.
    """
    chance = generator(seed, "divide", "dirichlet")
    draw = numpy.random.default_rng(int(torch.randint(2**62, (), generator=chance)))
    records = sum(len(pool) for pool in pools.values())
    for _ in range(DRAWS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for pool in pools.values():
            # Dirichlet shares of which some are set to zero, and the others made to sum to one
            # again, are Dirichlet shares of the others. Some client always has room: all having
            # their even part, no record would be left.
            room = [p for p in parts if not balanced or len(p) * clients < records]
            ends = draw.dirichlet([alpha] * len(room)).cumsum()[:-1] * len(pool)
            for part, share in zip(room, numpy.split(pool, ends.round().astype(int)), strict=True):
                part += share.tolist()
        if min(len(part) for part in parts) >= MINIMUM:
            return parts
    raise CoterieError(
        f"divide: {DRAWS} draws with alpha {alpha} never gave each of {clients} clients "
        f"{MINIMUM} of the {records} records; raise divide.alpha, lower divide.clients, or "
        "add records."
    )


def _by_mixture(pools: Pools, own_share: float) -> list[list[int]]:
    """Give each label's client `own_share` of that label and the rest evenly of the others.

    All clients are of one size. As each label is asked for as many records as a client has, the
    rarest label sets that size.
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


def _asked(mixtures: Mapping[str, Mapping[str, float]], pools: Pools) -> list[Mapping[str, float]]:
    """The shares of each client, in the order of names; every label must have records."""
    for client, shares in sorted(mixtures.items()):
        for label in shares:
            if label not in pools:
                raise CoterieError(
                    f"divide: client {client} requests the label {label!r}, which no record has "
                    f"(labels: {', '.join(pools)}); correct divide.mixtures."
                )
    return [mixtures[client] for client in sorted(mixtures)]


Mixtures = Sequence[Mapping[str, float]]
"""Each client's shares of the labels, of characters: so a client's tokens follow them."""


def _most(pools: Pools, mixtures: Mixtures, lengths: list[int]) -> float:
    """The characters that every client can have; the label that is scarcest decides."""
    sizes: list[float] = []
    for label, pool in pools.items():
        if asked := sum(shares.get(label, 0) for shares in mixtures):
            sizes.append(sum(lengths[number] for number in pool) / asked)
    return min(sizes)


def _take(pools: Pools, mixtures: Mixtures, lengths: list[int], size: float) -> list[list[int]]:
    """For each client the numbers of records of `size` characters, which leave the pools.

    Of each label a client has its share to within one record: what it is dealt begins and ends
    with the record's end that is nearest. Labels alternate so that the shares also hold, to
    within a record of each label, for the start of the text, which is what a limit keeps.
    """
    parts: list[list[tuple[float, int]]] = [[] for _ in mixtures]
    for label, pool in pools.items():
        ends = numpy.cumsum([0, *(lengths[number] for number in pool)])
        start, wanted = 0, 0.0
        for part, shares in zip(parts, mixtures, strict=True):
            wanted += size * shares.get(label, 0)
            end = int(abs(ends - wanted).argmin())
            middles = (ends[start:end] + ends[start + 1 : end + 1]) / 2 - ends[start]
            places = middles / (ends[end] - ends[start])  # 0 to 1, in the label's own text
            part += zip(places.tolist(), pool[start:end], strict=True)
            start = end
        del pool[:start]
    return [[number for _, number in sorted(part)] for part in parts]

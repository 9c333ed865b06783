"""Clean data: empty and very short texts, and texts that clients hold twice, exactly or nearly.

What is compared are records, prompts with their answers, and pieces of text files. Nothing here
travels: it is for whoever holds the texts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, cast

import numpy
from numpy.typing import NDArray

from coterie.data.chat import Conversation
from coterie.data.examples import Instruction
from coterie.data.preferences import Preference
from coterie.data.spec import PIECE
from coterie.data.texts import SPLITS, Texts, pieces
from coterie.data.tokens import ClientData, Split, Tokens

SHORT = 20
"""Characters below which a text is very short."""
NEAR = 0.8
"""Jaccard similarity of two texts' shingles from which they are nearly the same."""
SHINGLE = 8
"""Bytes of a shingle: a run of text, in lower case and with single spaces."""
COMMON = 50
"""A shingle in more texts than this is a template's or a phrase, and is left out of comparisons."""
BANDS, ROWS = 20, 5
"""Of MinHash: two texts with similarity 0.8 are missed once in 2,800 times."""

AT_START = 2_000_000
"""Characters in which a run that begins looks for near duplicates: about a second's work."""
Item = str | Instruction | Conversation | Preference
SEE = "; see `coterie data FILE`"

Kind = Literal["repeats", "in_training", "in_others"]
"""Where a text is found again: before it in its split; in its own client's training text; in
another client's training text."""
KINDS: tuple[Kind, ...] = ("repeats", "in_training", "in_others")


@dataclass(frozen=True)
class Place:
    """A text's client, split, and number in it, from 1."""

    client: str
    split: str
    number: int


@dataclass(frozen=True)
class Copy:
    """A text that is found again elsewhere, exactly or nearly."""

    kind: Kind
    exact: bool
    place: Place
    found: Place
    text: str


@dataclass(frozen=True)
class SplitQuality:
    """One client's split, as far as the run reads it."""

    client: str
    split: str
    tokens: int
    texts: int
    """Records, prompts with answers, or pieces of text files."""
    short: int
    exact: Mapping[Kind, int]
    """How many of its texts are found again, by where."""
    near: Mapping[Kind, int]


@dataclass(frozen=True)
class Quality:
    """What was found in clients' texts."""

    splits: list[SplitQuality]
    copies: list[Copy]
    empty: int
    """Records without text, which were left out."""
    compared: int | None
    """Characters of each split that near duplicates were looked for in; None: all."""


def quality(
    texts: Mapping[str, Texts[Any]], data: Mapping[str, ClientData], most: int, empty: int = 0
) -> Quality:
    """What is found in clients' texts, as far as their tokens reach, and `empty`.

    Exact duplicates are looked for everywhere. Near ones, too, unless that is more than `most`
    characters: then in the start of each split, and as much of each.
    """
    read = {
        (client, split): texts_read(getattr(own, split), getattr(data[client], split))
        for client, own in texts.items()
        for split in SPLITS
    }
    size = sum(len(text) for part in read.values() for text in part)
    compared = None if size <= most else most // len(read)
    copies = find_copies(read, compared)
    counts = Counter((c.kind, c.exact, c.place.client, c.place.split) for c in copies)
    splits = [
        SplitQuality(
            client,
            split,
            len(getattr(data[client], split).ids),
            len(part),
            sum(len(text.strip()) < SHORT for text in part),
            {kind: counts[kind, True, client, split] for kind in KINDS},
            {kind: counts[kind, False, client, split] for kind in KINDS},
        )
        for (client, split), part in read.items()
    ]
    return Quality(splits, copies, empty, compared)


def sentences(found: Quality) -> list[str]:
    """What a person should know before a run, a line for each kind; most often nothing."""
    held_out = [split for split in found.splits if split.split != "train"]
    train = [split for split in found.splits if split.split == "train"]
    counts = {
        "validation and test texts that are in training, too": _again(held_out, "in_training"),
        "validation and test texts in other clients' training": _again(held_out, "in_others"),
        "training texts of more than one client": _again(train, "in_others"),
        "texts repeated in their split": _again(found.splits, "repeats"),
        f"texts of less than {SHORT} characters": (sum(s.short for s in found.splits), 0),
        "empty records, left out": (found.empty, 0),
    }
    return [
        f"Data: {what}: {exact + near:,}" + (f" ({near:,} nearly)" if near else "") + SEE
        for what, (exact, near) in counts.items()
        if exact + near
    ]


def _again(splits: Sequence[SplitQuality], kind: Kind) -> tuple[int, int]:
    """How many texts are found again, exactly and nearly."""
    return sum(s.exact[kind] for s in splits), sum(s.near[kind] for s in splits)


def texts_read(items: Sequence[Any], read: Split) -> list[str]:
    """The texts of a split that are compared: whole ones, up to where its tokens end."""
    if not isinstance(read, Tokens):
        return [_text(item) for item in read.items]
    found: list[str] = []
    left = read.bytes
    for document in items:
        raw = document.encode()
        parts = list(pieces(raw[:left].decode(errors="ignore"), PIECE))
        found += parts if len(raw) <= left else parts[:-1]
        left -= len(raw)
        if left <= 0:
            break
    return [text for text in found if text.strip()]


def _text(item: Item) -> str:
    return item if isinstance(item, str) else item.text


def find_copies(
    splits: Mapping[tuple[str, str], Sequence[str]], compared: int | None = None
) -> list[Copy]:
    """Every text of (client, split) that is found again, once for each kind, exact before near.

    Exact copies are the same but for space around them. Near ones are looked for in the first
    `compared` characters of each split.
    """
    where: defaultdict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    nearby: dict[str, None] = {}
    for split, texts in splits.items():
        left = compared
        for number, text in enumerate(texts, start=1):
            where[text.strip()].setdefault(split, number)
            if left is None or left > 0:
                nearby[text.strip()] = None
                left = None if left is None else left - len(text)
    distinct = list(nearby)
    near: defaultdict[str, list[str]] = defaultdict(list)
    for a, b in near_pairs(distinct):
        near[distinct[a]].append(distinct[b])
        near[distinct[b]].append(distinct[a])
    copies = []
    for (client, split), texts in splits.items():
        for number, text in enumerate(texts, start=1):
            place = Place(client, split, number)
            exact = _found(place, where[text.strip()])
            nearly: dict[Kind, Place] = {}
            for other in near[text.strip()]:
                nearly = {**_found(place, where[other]), **nearly}
            for kind in KINDS:
                if found := exact.get(kind) or nearly.get(kind):
                    copies.append(Copy(kind, kind in exact, place, found, text))
    return copies


def _found(place: Place, where: Mapping[tuple[str, str], int]) -> dict[Kind, Place]:
    """Of a text's first places by split, those that make it a copy."""
    found: dict[Kind, Place] = {}
    for (client, split), number in where.items():
        kind: Kind | None = None
        if (client, split) == (place.client, place.split):
            kind = "repeats" if number < place.number else None
        elif split == "train":
            kind = "in_training" if client == place.client else "in_others"
        if kind is not None:
            found.setdefault(kind, Place(client, split, number))
    return found


def near_pairs(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs a < b of distinct texts that are nearly the same, in order.

    MinHash proposes pairs (A. Broder, 1997), whose similarity is then computed. Shingles that more
    than `COMMON` texts have do not count: records that share a long template are not alike.
    """
    from datasketch import MinHash, MinHashLSH  # imports SciPy, which takes half a second

    sets = _rare([_shingles(text) for text in texts])
    empty = MinHash(BANDS * ROWS, hashfunc=int)
    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    pairs: list[tuple[int, int]] = []
    for b, shingles in enumerate(sets):
        if not len(shingles):
            continue
        sketch = empty.copy()
        sketch.update_batch(shingles)
        proposed = sorted(cast("list[int]", index.query(sketch)))
        pairs += [(a, b) for a in proposed if _jaccard(sets[a], shingles) >= NEAR]
        index.insert(b, sketch, check_duplication=False)
    return sorted(pairs)


def _shingles(text: str) -> NDArray[numpy.uint32]:
    """Hashes of all runs of `SHINGLE` bytes, each once, sorted; a shorter text is one run."""
    raw = " ".join(text.lower().split()).encode().ljust(SHINGLE)
    runs = numpy.lib.stride_tricks.sliding_window_view(numpy.frombuffer(raw, "u1"), SHINGLE)
    numbers = numpy.ascontiguousarray(runs).view("<u8").ravel()
    mixed = (numbers ^ (numbers >> numpy.uint64(29))) * numpy.uint64(0x9E3779B97F4A7C15)
    return numpy.unique((mixed >> numpy.uint64(32)).astype(numpy.uint32))


def _rare(sets: Sequence[NDArray[numpy.uint32]]) -> list[NDArray[numpy.uint32]]:
    """The sets without what is in more than `COMMON` of them."""
    if not sets:
        return []
    values, counts = numpy.unique(numpy.concatenate(sets), return_counts=True)
    common = values[counts > COMMON]
    return [one[~numpy.isin(one, common, assume_unique=True)] for one in sets]


def _jaccard(a: NDArray[numpy.uint32], b: NDArray[numpy.uint32]) -> float:
    both = len(numpy.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def without_held_out(texts: Texts[Any]) -> Texts[Any]:
    """A client's texts, without what of its training text is, exactly or nearly, in its validation
    or test.

    A document loses the pieces concerned; what stood between them becomes documents of their own.
    """
    held_out = {
        _text(part).strip() for item in (*texts.validation, *texts.test) for part in _parts(item)
    }
    train = [(number, part) for number, item in enumerate(texts.train) for part in _parts(item)]
    distinct = sorted(held_out.union(_text(part).strip() for _, part in train))
    again = set(held_out)
    for pair in near_pairs(distinct):
        a, b = (distinct[number] for number in pair)
        again |= {a, b} if held_out & {a, b} else set()
    kept: list[Any] = []
    parts = [(number, part, _text(part).strip() in again) for number, part in train]
    for (_, gone), run in groupby(parts, key=lambda part: (part[0], part[2])):
        if not gone:
            kept.append(_joined([part for _, part, _ in run]))
    return Texts(kept, texts.validation, texts.test)


def _parts(item: Item) -> Sequence[Item]:
    """What is compared of an item: its pieces, or the prompt with its answer as a whole."""
    return list(pieces(item, PIECE)) if isinstance(item, str) else [item]


def _joined(parts: Sequence[Any]) -> Any:
    return "".join(parts) if isinstance(parts[0], str) else parts[0]

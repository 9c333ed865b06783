"""Clean data: empty and very short texts, and texts that clients hold twice, exactly or nearly.

What is compared are records, prompts with their answers, and pieces of text files. Nothing here
travels: it is for whoever holds the texts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from coterie.data.control import own_texts
from coterie.data.files import listed, listed_first
from coterie.data.items import Item as Sample
from coterie.data.kinds.text import pieces
from coterie.data.near import near_pairs
from coterie.data.spec import PIECE
from coterie.data.split import Split
from coterie.data.survey import Survey
from coterie.data.texts import SPLITS, Texts
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError

SHORT = 20
"""Characters below which a text is very short."""
AT_START = 2_000_000
"""Characters in which a run that begins looks for near duplicates: about a second's work."""
Progress = Callable[[int, int], None]
"""A progress callback, which receives the number done and the total."""
Item = str | Sample
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
    removed: int
    """How many texts `data.deduplicate` removed."""


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens of one client's split, or of the public text, that are no ordinary text."""

    client: str
    split: str
    tokens: int
    unknown: int
    """Unknown tokens: each replaces characters that the tokenizer has no token for."""
    control: int
    """Control tokens in texts, within `data.limits` or not."""


@dataclass(frozen=True)
class Quality:
    """What was found in clients' texts."""

    splits: list[SplitQuality]
    copies: list[Copy]
    special: list[SpecialTokens]
    survey: Survey
    compared: int | None
    """Characters of each split that near duplicates were looked for in; None: all."""
    deduplicated: bool
    """Whether `data.deduplicate` is on."""


def unknown_tokens(read: Split, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many of the tokens that a run reads of a split are unknown ones."""
    unknown = tokenizer.unk_token_id
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)  # GPT-2's unknown token is its end
    if not isinstance(unknown, int) or unknown in ends:
        return 0
    return int(read.ids.eq(unknown).sum())


def quality(
    texts: Mapping[str, Texts[Any]],
    data: Mapping[str, ClientData],
    most: int,
    survey: Survey,
    special: list[SpecialTokens],
    removed: Mapping[str, int] | None = None,
    progress: Progress = lambda done, of: None,
) -> Quality:
    """Return what is found in clients' texts, as far as their tokens reach.

    Exact duplicates are looked for everywhere. Near ones, too, unless that is more than `most`
    characters: then in the start of each split, and as much of each. `removed` are the texts that
    `data.deduplicate` removed, by client; None: it is off.
    """
    read = {
        (client, split): getattr(data[client], split).compared(getattr(own, split))
        for client, own in texts.items()
        for split in SPLITS
    }
    size = sum(len(_text(item)) for part in read.values() for item in part)
    compared = None if size <= most else most // len(read)
    copies = find_copies(read, compared, progress)
    counts = Counter((c.kind, c.exact, c.place.client, c.place.split) for c in copies)
    splits = [
        SplitQuality(
            client,
            split,
            len(getattr(data[client], split).ids),
            len(part),
            sum(len(_text(item)) < SHORT for item in part),
            {kind: counts[kind, True, client, split] for kind in KINDS},
            {kind: counts[kind, False, client, split] for kind in KINDS},
            (removed or {}).get(client, 0) if split == "train" else 0,
        )
        for (client, split), part in read.items()
    ]
    return Quality(splits, copies, special, survey, compared, removed is not None)


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
        "empty records, left out": (found.survey.empty, 0),
    }
    lines = [
        f"{what}: {exact + near:,}" + (f" ({near:,} nearly)" if near else "")
        for what, (exact, near) in counts.items()
        if exact + near
    ]
    if found.deduplicated:
        removed = {f"{s.client} {s.split}": s.removed for s in train}
        lines.append(f"texts removed by data.deduplicate: {_total(removed)}")
    for what, by_owner in (
        ("fields not used (records that have them)", found.survey.unused),
        ("files skipped", found.survey.skipped),
    ):
        if by_owner:
            kinds = {kind: sum(counts.values()) for kind, counts in by_owner.items()}
            lines.append(f"{what}: {listed(kinds)}")
    if unknown := sum(s.unknown for s in found.special):
        share = unknown / sum(s.tokens for s in found.special)
        lines.append(f"unknown tokens: {unknown:,} ({share:.2%} of all)")
    if any(s.control for s in found.special):
        control = {f"{s.client} {s.split}": s.control for s in found.special}
        lines.append(f"control tokens in texts, trained as such: {_total(control)}")
    return [f"Data: {line}{SEE}" for line in lines]


def _total(counts: Mapping[str, int]) -> str:
    """Return a sum and its largest parts by name, such as "3 (anna train 2, ben test 1)"."""
    parts = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f"{sum(counts.values()):,}" + (f" ({listed_first(parts)})" if parts else "")


def _again(splits: Sequence[SplitQuality], kind: Kind) -> tuple[int, int]:
    """How many texts are found again, exactly and nearly."""
    return sum(s.exact[kind] for s in splits), sum(s.near[kind] for s in splits)


def _text(item: Item) -> str:
    """Return the whole text, by which exact copies are found."""
    return (item if isinstance(item, str) else item.text).strip()


def find_copies(
    splits: Mapping[tuple[str, str], Sequence[Item]],
    compared: int | None = None,
    progress: Progress = lambda done, of: None,
) -> list[Copy]:
    """Return every text of (client, split) that is found again, once for each kind, exact before
    near.

    Exact copies are the same but for space around them. Near ones are looked for in the first
    `compared` characters of each split.
    """
    where: defaultdict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    nearby: dict[str, Item] = {}
    for split, items in splits.items():
        left = compared
        for number, item in enumerate(items, start=1):
            text = _text(item)
            where[text].setdefault(split, number)
            if left is None or left > 0:
                nearby.setdefault(text, item)
                left = None if left is None else left - len(text)
    near = _near(nearby, progress)
    copies = []
    for (client, split), items in splits.items():
        for number, item in enumerate(items, start=1):
            text, place = _text(item), Place(client, split, number)
            exact = _found(place, where[text])
            nearly: dict[Kind, Place] = {}
            for other in near[text]:
                nearly = {**_found(place, where[other]), **nearly}
            for kind in KINDS:
                if found := exact.get(kind) or nearly.get(kind):
                    shown = "\n".join(filter(None, own_texts(item)))
                    copies.append(Copy(kind, kind in exact, place, found, shown))
    return copies


def _near(
    items: Mapping[str, Item], progress: Progress = lambda done, of: None
) -> defaultdict[str, list[str]]:
    """Return the near duplicates of each text among distinct ones."""
    texts = list(items)
    near: defaultdict[str, list[str]] = defaultdict(list)
    for a, b in near_pairs(list(map(own_texts, items.values())), progress):
        near[texts[a]].append(texts[b])
        near[texts[b]].append(texts[a])
    return near


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


def without_held_out(texts: Texts[Any], owner: str) -> tuple[Texts[Any], int]:
    """Return a client's texts without the training texts that are, exactly or nearly, in its
    validation or test, and how many these are.

    A document loses the pieces concerned; what stood between them becomes documents of their own.
    Raises CoterieError, which begins with `owner`, if nothing is left to train on.
    """
    held_out = {
        _text(part): part for item in (*texts.validation, *texts.test) for part in _parts(item)
    }
    train = [(number, part) for number, item in enumerate(texts.train) for part in _parts(item)]
    every = held_out | {_text(part): part for _, part in train}
    near = _near(dict(sorted(every.items())))
    again = held_out.keys() | {other for text in held_out for other in near[text]}
    kept: list[Any] = []
    parts = [(number, part, _text(part) in again) for number, part in train]
    for (_, gone), run in groupby(parts, key=lambda part: (part[0], part[2])):
        left: list[Any] = [part for _, part, _ in run]
        if not gone:
            kept.append("".join(left) if isinstance(left[0], str) else left[0])
    removed = sum(gone and bool(_text(part)) for _, part, gone in parts)
    if removed and not any(_text(part) for _, part, gone in parts if not gone):
        raise CoterieError(
            f"{owner}: data.deduplicate removes its whole train split ({removed:,} texts), as each "
            "text is also in its validation or test split, exactly or nearly; give other splits, "
            "or set data.deduplicate to false."
        )
    return Texts(kept, texts.validation, texts.test), removed


def _parts(item: Item) -> Sequence[Item]:
    """What is compared of an item: its pieces, or the prompt with its answer as a whole."""
    return list(pieces(item, PIECE)) if isinstance(item, str) else [item]

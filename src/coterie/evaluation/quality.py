"""Data quality: very short texts, and exact and near duplicates within and between clients.

The texts that are compared are records, prompts with answers, and pieces of text files. The results
contain texts. They are therefore shown only on the machine that holds the texts, and are never sent
to another machine.
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
from coterie.data.spec import PIECE
from coterie.data.split import Split
from coterie.data.texts import SPLITS, Texts
from coterie.data.tokens import ClientData
from coterie.errors import CoterieError
from coterie.evaluation.near import near_pairs
from coterie.evaluation.survey import Survey

SHORT = 20
"""A text with fewer characters than this is reported as very short."""
AT_START = 2_000_000
"""The maximum number of characters that a run searches for near duplicates when it starts.

The search through this number of characters takes about 1 s.
"""
Progress = Callable[[int, int], None]
"""A progress callback, which receives the number of compared texts and the total number."""
Item = str | Sample
"""A text to compare: a document, a piece of a document, or an item of another kind of data."""
SEE = "; run `coterie data FILE` for details"
"""The text at the end of each line that `sentences` returns."""

Kind = Literal["repeats", "in_training", "in_others"]
"""The kind of a duplicate, which depends on where the original text is.

The original is earlier in the same split ("repeats"), in the training text of the same client
("in_training"), or in the training text of another client ("in_others").
"""
KINDS: tuple[Kind, ...] = ("repeats", "in_training", "in_others")


@dataclass(frozen=True)
class Place:
    """The client and the split that contain a text, and the text's number in the split.

    The texts of a split are numbered from 1.
    """

    client: str
    split: str
    number: int


@dataclass(frozen=True)
class Copy:
    """A text that duplicates another text, exactly or nearly."""

    kind: Kind
    exact: bool
    place: Place
    """The place of the duplicate."""
    original: Place
    """The place of the original text."""
    text: str
    """The text of the duplicate."""


@dataclass(frozen=True)
class SplitQuality:
    """The quality of one client's split. Texts that the run does not read are ignored."""

    client: str
    split: str
    tokens: int
    """The number of tokens."""
    texts: int
    """The number of records, prompts with answers, or pieces of text files."""
    short: int
    """The number of texts shorter than `SHORT`."""
    exact: Mapping[Kind, int]
    """The number of exact duplicates of each kind."""
    near: Mapping[Kind, int]
    """The number of near duplicates of each kind."""
    removed: int
    """The number of texts that `data.deduplicate` removed."""


@dataclass(frozen=True)
class SpecialTokens:
    """The counts of special tokens in one client's split, or in the public text."""

    client: str
    split: str
    tokens: int
    """The total number of tokens."""
    unknown: int
    """The number of unknown tokens, which replace characters outside the vocabulary."""
    control: int
    """The number of control tokens in the texts, including texts beyond `data.limits`."""


@dataclass(frozen=True)
class Quality:
    """The quality of clients' texts, as reported by `coterie data`."""

    splits: list[SplitQuality]
    copies: list[Copy]
    """All duplicates."""
    special: list[SpecialTokens]
    survey: Survey
    compared: int | None
    """The number of characters of each split that were searched for near duplicates.

    None means that all characters were searched.
    """
    deduplicated: bool
    """Whether `data.deduplicate` is on."""


def unknown_tokens(read: Split, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the unknown tokens in a split, which is already truncated to its limit."""
    unknown = tokenizer.unk_token_id
    # GPT-2 declares its end-of-text token as its unknown token, too.
    ends = (tokenizer.eos_token_id, tokenizer.bos_token_id)
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
    """Measure the quality of clients' texts. Texts beyond a split's limit are ignored.

    Args:
        texts: The texts of each client.
        data: The tokens of each client.
        most: The maximum total number of characters to search for near duplicates. If the texts are
            longer, only the start of each split is searched, with the same number of characters for
            every split. All texts are searched for exact duplicates.
        survey: The counts of unused fields, skipped files and empty records.
        special: The counts of special tokens.
        removed: For each client, the number of texts that `data.deduplicate` removed. None if
            `data.deduplicate` is off.
        progress: A callback that receives the number of compared texts and the total number.
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


def sentences(report: Quality) -> list[str]:
    """Return the warnings that a run shows before it begins, one line per problem."""
    held_out = [split for split in report.splits if split.split != "train"]
    train = [split for split in report.splits if split.split == "train"]
    counts = {
        "validation or test texts duplicated in the same client's training text": _duplicates(
            held_out, "in_training"
        ),
        "validation or test texts duplicated in another client's training text": _duplicates(
            held_out, "in_others"
        ),
        "training texts duplicated in another client's training text": _duplicates(
            train, "in_others"
        ),
        "texts duplicated within a split": _duplicates(report.splits, "repeats"),
        f"texts shorter than {SHORT} characters": (sum(s.short for s in report.splits), 0),
        "empty records, excluded": (report.survey.empty, 0),
    }
    lines = [
        f"{label}: {exact + near:,}" + (f" ({exact:,} exact, {near:,} near)" if near else "")
        for label, (exact, near) in counts.items()
        if exact + near
    ]
    if report.deduplicated:
        removed = {f"{s.client} {s.split}": s.removed for s in train}
        lines.append(f"texts removed by data.deduplicate: {_total(removed)}")
    for label, by_owner in (
        ("unused fields (number of records with a value)", report.survey.unused),
        ("skipped files", report.survey.skipped),
    ):
        if by_owner:
            kinds = {kind: sum(counts.values()) for kind, counts in by_owner.items()}
            lines.append(f"{label}: {listed(kinds)}")
    if unknown := sum(s.unknown for s in report.special):
        share = unknown / sum(s.tokens for s in report.special)
        lines.append(f"unknown tokens: {unknown:,} ({share:.2%} of all tokens)")
    if any(s.control for s in report.special):
        control = {f"{s.client} {s.split}": s.control for s in report.special}
        lines.append(f"strings in texts that are encoded as control tokens: {_total(control)}")
    return [f"Data: {line}{SEE}" for line in lines]


def _total(counts: Mapping[str, int]) -> str:
    """Format the sum of counts, and then the counts, as in "3 (anna train 2, ben test 1)".

    Only the first few counts are listed.
    """
    parts = [f"{name} {count:,}" for name, count in counts.items() if count]
    return f"{sum(counts.values()):,}" + (f" ({listed_first(parts)})" if parts else "")


def _duplicates(splits: Sequence[SplitQuality], kind: Kind) -> tuple[int, int]:
    """Count the duplicates of one kind in all splits.

    The kind of a duplicate depends on where its original is; see `Kind`. Exact and near duplicates
    of this kind are counted separately.

    Returns:
        The number of exact duplicates, and the number of near duplicates.
    """
    return sum(s.exact[kind] for s in splits), sum(s.near[kind] for s in splits)


def _text(item: Item) -> str:
    """Return the text of an item. Items with equal texts are exact duplicates."""
    return (item if isinstance(item, str) else item.text).strip()


def find_copies(
    splits: Mapping[tuple[str, str], Sequence[Item]],
    compared: int | None = None,
    progress: Progress = lambda done, of: None,
) -> list[Copy]:
    """Find all texts that are exact or near duplicates of other texts.

    The kind of a duplicate depends on where the original is; see `Kind`. A text is reported at most
    once for each kind. It is reported as an exact duplicate if possible, or else as a near
    duplicate. Exact duplicates are equal except for surrounding white space.

    Args:
        splits: A mapping from each pair (client, split) to the texts of this split.
        compared: The number of characters at the start of each split that are searched for near
            duplicates. None means that all characters are searched.
        progress: A callback that receives the number of compared texts and the total number.
    """
    numbers: defaultdict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    candidates: dict[str, Item] = {}
    for split, items in splits.items():
        left = compared
        for number, item in enumerate(items, start=1):
            text = _text(item)
            numbers[text].setdefault(split, number)
            if left is None or left > 0:
                candidates.setdefault(text, item)
                left = None if left is None else left - len(text)
    near = _near(candidates, progress)
    copies = []
    for (client, split), items in splits.items():
        for number, item in enumerate(items, start=1):
            text, place = _text(item), Place(client, split, number)
            exact_originals = _originals(place, numbers[text])
            near_originals: dict[Kind, Place] = {}
            for other in near[text]:
                near_originals = {**_originals(place, numbers[other]), **near_originals}
            for kind in KINDS:
                if original := exact_originals.get(kind) or near_originals.get(kind):
                    shown = "\n".join(filter(None, own_texts(item)))
                    copies.append(Copy(kind, kind in exact_originals, place, original, shown))
    return copies


def _near(
    items: Mapping[str, Item], progress: Progress = lambda done, of: None
) -> defaultdict[str, list[str]]:
    """Return a mapping from each text to the other texts that are near duplicates of it.

    A text without near duplicates is mapped to an empty list.

    Args:
        items: A mapping from each text to an item with this text. The near duplicates are searched
            for among these texts.
        progress: A callback that receives the number of compared texts and the total number.
    """
    texts = list(items)
    near: defaultdict[str, list[str]] = defaultdict(list)
    for a, b in near_pairs(list(map(own_texts, items.values())), progress):
        near[texts[a]].append(texts[b])
        near[texts[b]].append(texts[a])
    return near


def _originals(place: Place, numbers: Mapping[tuple[str, str], int]) -> dict[Kind, Place]:
    """Return a mapping from each kind of duplicate to the place of the first original.

    A kind is left out if there is no original of this kind.

    Args:
        place: The place of the possible duplicate.
        numbers: A mapping from a pair (client, split) to the position, counted from 1, of the first
            text in this split that is equal, or nearly equal, to the text at `place`. Splits
            without any of these texts are left out.
    """
    originals: dict[Kind, Place] = {}
    for (client, split), number in numbers.items():
        kind: Kind | None = None
        if (client, split) == (place.client, place.split):
            kind = "repeats" if number < place.number else None
        elif split == "train":
            kind = "in_training" if client == place.client else "in_others"
        if kind is not None:
            originals.setdefault(kind, Place(client, split, number))
    return originals


def without_held_out(texts: Texts[Any], owner: str) -> tuple[Texts[Any], int]:
    """Remove the training texts that are exact or near duplicates of validation or test texts.

    From a document, only the pieces that are duplicates are removed. The texts before, between and
    after these pieces become separate documents.

    Args:
        texts: A client's texts.
        owner: The words with which an error message begins, such as "Client anna".

    Returns:
        The texts without duplicates, and the number of removed texts or pieces.

    Raises:
        CoterieError: No training text is left.
    """
    held_out = {
        _text(part): part for item in (*texts.validation, *texts.test) for part in _parts(item)
    }
    train = [(number, part) for number, item in enumerate(texts.train) for part in _parts(item)]
    all_parts = held_out | {_text(part): part for _, part in train}
    near = _near(dict(sorted(all_parts.items())))
    duplicates = held_out.keys() | {other for text in held_out for other in near[text]}
    kept: list[Any] = []
    parts = [(number, part, _text(part) in duplicates) for number, part in train]
    for (_, is_duplicate), run in groupby(parts, key=lambda part: (part[0], part[2])):
        left: list[Any] = [part for _, part, _ in run]
        if not is_duplicate:
            kept.append("".join(left) if isinstance(left[0], str) else left[0])
    removed = sum(is_duplicate and bool(_text(part)) for _, part, is_duplicate in parts)
    if removed and not any(_text(part) for _, part, is_duplicate in parts if not is_duplicate):
        raise CoterieError(
            f"{owner}: data.deduplicate removes the whole train split ({removed:,} texts), because "
            "every text is an exact or near duplicate of a validation or test text; use other "
            "splits, or set data.deduplicate to false."
        )
    return Texts(kept, texts.validation, texts.test), removed


def _parts(item: Item) -> Sequence[Item]:
    """Return the parts of an item that are compared: a document's pieces, or the item itself."""
    return list(pieces(item, PIECE)) if isinstance(item, str) else [item]

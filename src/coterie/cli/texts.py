"""The texts of a run, compared: what `coterie data` finds and shows."""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from coterie.analysis.tables import Table
from coterie.bases import load_tokenizer
from coterie.cli import terminal
from coterie.config.run import RunConfig
from coterie.data.files import listed_first
from coterie.data.near import NEAR
from coterie.data.quality import KINDS, SHORT, Copy, Place, Quality
from coterie.federation.participants import gathered
from coterie.federation.reading import Reading
from coterie.files import write_json

EXAMPLES = 2
"""Shown of each kind of copy."""
SHOWN = 60
"""Characters of an example's text."""
MOST = 50_000_000
"""Characters in which near duplicates are looked for: about half a minute's work."""
HEADS = {"repeats": "repeated", "in_training": "in train", "in_others": "in others"}


def compare_texts(config: RunConfig, json: Path | None) -> None:
    """See `coterie data`."""
    readings: list[Reading] = []
    with terminal.progress("Loading the tokenizer") as (begin, progress):
        tokenizer = load_tokenizer(config.base, config.root)
        gathered(config, tokenizer, readings.append, begin)
        [read] = readings
        begin("Comparing texts")
        found = read.quality(config, MOST, progress)
    labels = [_labels(read)] if read.labels else []
    terminal.console.print(_splits(found), _special(found), *labels)
    _examples(found)
    _left_out(found)
    if json is not None:
        write_json(
            json,
            {
                **asdict(found, dict_factory=_json_keys),
                "empty": found.survey.empty,
                "labels": read.labels,
            },
        )
        terminal.say(f"\nSaved to {json}.")


def _json_keys(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a dataclass by their keys in the JSON file."""
    return {"found" if name == "original" else name: value for name, value in fields}


def _splits(found: Quality) -> Table:
    """A row per client and split; copies as exact ones and, after a plus sign, near ones."""
    rows = []
    for split in found.splits:
        copies = {kind: _copies(split.exact[kind], split.near[kind]) for kind in KINDS}
        if split.split == "train":
            copies["in_training"] = ""
        figures = [f"{split.tokens:,}", f"{split.texts:,}", f"{split.short:,}"]
        rows.append([f"{split.client} {split.split}", *figures, *copies.values()])
    looked = "" if found.compared is None else f", in {found.compared:,} characters of each split"
    return Table(
        "Texts by client and split",
        ["", "tokens", "texts", "short", *(HEADS[kind] for kind in KINDS)],
        rows,
        "Texts: records, samples, or pieces of text files, within data.limits, without the text of "
        "templates. "
        f"Short: less than {SHORT} characters. Duplicates: exact + near (similarity {NEAR} or "
        f"more{looked}), repeated in the same split, or found in the training text of the same "
        f"client or of others. Empty records, left out: {found.survey.empty:,}.",
    )


def _copies(exact: int, near: int) -> str:
    return f"{exact:,}" + (f" + {near:,}" if near else "")


def _special(found: Quality) -> Table:
    """A row per client and split: unknown and control tokens, and what was removed."""
    removed = {(s.client, s.split): f"{s.removed:,}" for s in found.splits}
    rows = [
        [f"{s.client} {s.split}", f"{s.unknown / max(1, s.tokens):.2%}", f"{s.control:,}"]
        + [removed.get((s.client, s.split), "")] * found.deduplicated
        for s in found.special
    ]
    return Table(
        "Special tokens" + " and removed duplicates" * found.deduplicated,
        ["", "unknown", "control", *["removed"] * found.deduplicated],
        rows,
        "Unknown: share of unknown tokens, which replace what the tokenizer cannot encode. "
        "Control: special tokens, such as <|endoftext|>, and chat markers in texts; the model "
        "learns them as such. To refuse them, set data.special_tokens: refuse."
        + " Removed: texts that data.deduplicate leaves out."
        * found.deduplicated,
    )


def _left_out(found: Quality) -> None:
    """Print the fields and files that are not read, and whose they are."""
    for field, counts in sorted(found.survey.unused.items()):
        terminal.say(f"Field {field} is not used; records that contain it: {_owners(counts)}.")
    for kind, counts in sorted(found.survey.skipped.items()):
        terminal.say(f"Skipped {kind}: {_owners(counts)}.")


def _owners(counts: Mapping[str, int]) -> str:
    """The owners with their numbers, the first ones by name."""
    return listed_first([f"{owner} ({count:,})" for owner, count in counts.items()])


def _labels(read: Reading) -> Table:
    labels = sorted({label for counts in read.labels.values() for label in counts})
    rows = [
        [client, *(f"{counts.get(label, 0):,}" for label in labels)]
        for client, counts in read.labels.items()
    ]
    return Table("Training records by label, before limits", ["", *labels], rows)


def _examples(found: Quality) -> None:
    """Where some copies are, and how they begin."""

    def kind(copy: Copy) -> tuple[int, bool]:
        return KINDS.index(copy.kind), not copy.exact

    for _, copies in groupby(sorted(found.copies, key=kind), key=kind):
        for copy in list(copies)[:EXAMPLES]:
            is_in = "is" if copy.exact else "is nearly"
            text = " ".join(copy.text.split())
            short = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
            terminal.say(f"{_place(copy.place)} {is_in} {_place(copy.original)}: {short}")


def _place(place: Place) -> str:
    return f"{place.client} {place.split} {place.number}"

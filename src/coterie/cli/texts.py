"""The output of `coterie data`: tables of a run's texts, and examples of duplicates."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from coterie.analysis.tables import Table
from coterie.bases import load_tokenizer
from coterie.cli import terminal
from coterie.config.run import RunConfig
from coterie.data.files import listed, listed_first
from coterie.evaluation.near import NEAR
from coterie.evaluation.quality import KINDS, SHORT, Copy, Place, Quality
from coterie.federation.participants import gathered
from coterie.federation.reading import Reading
from coterie.files import write_json

EXAMPLES = 2
"""Number of examples of each kind of duplicate."""
SHOWN = 60
"""Maximum number of characters of a duplicated text that are printed."""
MOST = 50_000_000
"""Maximum number of characters to search for near duplicates; this takes about half a minute."""
HEADS = {"repeats": "repeated", "in_training": "in train", "in_others": "in others"}


def compare_texts(config: RunConfig, json: Path | None) -> None:
    """Compare the texts of a run, and print the results; see `coterie data`."""
    readings: list[Reading] = []
    with terminal.progress("Loading the tokenizer") as show:
        gathered(config, load_tokenizer(config.base, config.root), readings.append, show)
        [reading] = readings
        quality = reading.quality(config, MOST, partial(show, "Comparing texts"))
    labels = [_labels(reading)] if reading.labels else []
    terminal.console.print(_splits(quality), _special(quality), *labels)
    _examples(quality)
    _left_out(quality)
    if json is not None:
        results = asdict(quality, dict_factory=_json_keys)
        write_json(json, results | {"empty": quality.survey.empty, "labels": reading.labels})
        terminal.say(f"\nSaved to {json}.")


def _json_keys(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert the fields of a dataclass to a mapping for the JSON file.

    The names of the fields become the keys of the mapping. One name is changed: `original`, which
    says where a duplicate's original text is, becomes `found`.
    """
    return {"found" if name == "original" else name: value for name, value in fields}


def _splits(quality: Quality) -> Table:
    """Return a table of text sizes and numbers of duplicates, with a row per client and split."""
    rows = []
    for split in quality.splits:
        copies = {kind: _copies(split.exact[kind], split.near[kind]) for kind in KINDS}
        if split.split == "train":
            copies["in_training"] = ""
        counts = [f"{split.tokens:,}", f"{split.texts:,}", f"{split.short:,}"]
        rows.append([f"{split.client} {split.split}", *counts, *copies.values()])
    limit = quality.compared
    extent = ""
    if limit is not None:
        extent = f" and are searched for only in the first {limit:,} characters of each split"
    return Table(
        "Texts by client and split",
        ["", "tokens", "texts", "short", *(HEADS[kind] for kind in KINDS)],
        rows,
        "Texts: number of records, samples or pieces of text files. Texts beyond data.limits are "
        "not counted. Short: number of texts with fewer than "
        f"{SHORT} characters. The last three columns contain the numbers of exact + near "
        "duplicates; the text of templates is not compared. Repeated: texts that duplicate an "
        "earlier text in the same split. In train: texts that duplicate a text in the client's "
        "own training text. In others: texts that duplicate a text in another client's training "
        f"text. Near duplicates have a similarity of at least {NEAR}{extent}. Excluded empty "
        f"records: {quality.survey.empty:,}.",
    )


def _copies(exact: int, near: int) -> str:
    return f"{exact:,}" + (f" + {near:,}" if near else "")


def _special(quality: Quality) -> Table:
    """Return a table of special tokens and removed duplicates, with a row per client and split."""
    removed = {(s.client, s.split): f"{s.removed:,}" for s in quality.splits}
    rows = [
        [f"{s.client} {s.split}", f"{s.unknown / max(1, s.tokens):.2%}", f"{s.control:,}"]
        + [removed.get((s.client, s.split), "")] * quality.deduplicated
        for s in quality.special
    ]
    return Table(
        "Special tokens" + " and removed duplicates" * quality.deduplicated,
        ["", "unknown", "control", *["removed"] * quality.deduplicated],
        rows,
        "Unknown: share of unknown tokens, which replace text that the tokenizer cannot encode. "
        "Control: number of special tokens (such as <|endoftext|>) and chat markers that occur in "
        "texts. The model learns both as control tokens. To refuse texts that contain any, set "
        "data.special_tokens: refuse."
        + " Removed: texts excluded by data.deduplicate."
        * quality.deduplicated,
    )


def _left_out(quality: Quality) -> None:
    """Print the data fields that the run does not use, and the files that it skips.

    A field's line ends with the owners of the records, and with a count for each owner. Skipped
    files are counted by their suffixes, in a line for each owner. An owner is the part of the run
    file that specifies the path of the files: a client, the server, the public text, or the section
    `divide`.
    """
    for field, counts in sorted(quality.survey.unused.items()):
        terminal.say(f"Field {field} is not used; records that contain it: {_owners(counts)}.")
    skipped: dict[str, dict[str, int]] = {}
    for kind, counts in quality.survey.skipped.items():
        for owner, count in counts.items():
            skipped.setdefault(owner, {})[kind] = count
    for owner, kinds in sorted(skipped.items()):
        terminal.say(f"Skipped in {_folder_of(owner)}: {listed(kinds)}.")


def _folder_of(owner: str) -> str:
    """Return the phrase for the folder of an owner, such as "anna's folder" for "Client anna"."""
    client = owner.removeprefix("Client ")
    return (
        f"{client}'s folder" if client != owner else f"the folder of {owner[0].lower()}{owner[1:]}"
    )


def _owners(counts: Mapping[str, int]) -> str:
    """Format the owners of records, as in "Client anna (3), Client ben (1)".

    A long list is abbreviated.

    Args:
        counts: The number of records of each owner.
    """
    return listed_first([f"{owner} ({count:,})" for owner, count in counts.items()])


def _labels(reading: Reading) -> Table:
    labels = sorted({label for counts in reading.labels.values() for label in counts})
    rows = [
        [client, *(f"{counts.get(label, 0):,}" for label in labels)]
        for client, counts in reading.labels.items()
    ]
    return Table(
        "Training records by class label, before data.limits are applied", ["", *labels], rows
    )


def _examples(quality: Quality) -> None:
    """Print a few duplicates of each kind.

    A line contains the places of the duplicate and of its original, and the beginning of the text.
    """

    def kind(copy: Copy) -> tuple[int, bool]:
        return KINDS.index(copy.kind), not copy.exact

    for _, copies in groupby(sorted(quality.copies, key=kind), key=kind):
        for copy in list(copies)[:EXAMPLES]:
            relation = "duplicates" if copy.exact else "is a near duplicate of"
            text = " ".join(copy.text.split())
            short = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
            terminal.say(f"{_place(copy.place)} {relation} {_place(copy.original)}: {short}")


def _place(place: Place) -> str:
    return f"{place.client} {place.split} {place.number}"

"""Files of a divided data set, from which a run reads the same texts as from the division."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from coterie.data.division.divide import Division
from coterie.data.division.labelled import Labelled
from coterie.data.files import read_records
from coterie.data.spec import DataSpec, InstructionSpec, TextSpec
from coterie.data.texts import SPLITS, items_by_split
from coterie.errors import CoterieError
from coterie.files import make_folder, write_text


class DivisionFiles:
    """Writes the records of a division as .jsonl files that a run can read.

    A record of plain text has the field `text`. All other records have the fields of the original
    records that the kind of data reads. Where the kind collects an answer's choices from all
    records, each record also has a field with these choices, because one client's records may
    contain fewer answers.

    Args:
        division: The division, whose items are of the class `Labelled`.
        data: The run file's section `data:`.
        label: The name of the field that contains a record's label (`divide.label`).
    """

    def __init__(self, division: Division, data: DataSpec, label: str) -> None:
        self.division, self.data, self.label = division, data, label
        self.used = data.bound.used()
        self.choices: str | None = None
        """The field that contains a record's choices, if the files need one."""
        kind, parts = data.bound, [*division.values(), *filter(None, [division.public])]
        records = (record for part in parts for split in vars(part).values() for record in split)
        collects = isinstance(kind, InstructionSpec) and kind.choices is None
        if collects and all(record.item.choices for record in records):
            self.choices = "all_choices" if "choices" in self.used else "choices"

    @property
    def settings(self) -> dict[str, str]:
        """The keys of the run file that the files need, as a mapping of dotted paths to values."""
        if self.data.declared is TextSpec:
            return {"data.text": "text"}
        return {} if self.choices is None else {"data.instructions.choices": self.choices}

    def check(self) -> None:
        """Raise CoterieError if a client receives no training, validation or test text."""
        for client, texts in self.division.items():
            for split in SPLITS:
                if not getattr(texts, split):
                    raise CoterieError(
                        f"divide: client {client} receives no {split} text; add records, or change "
                        "data.fractions or divide."
                    )

    def write_client(self, client: str, folder: Path) -> bool:
        """Write a file for each of a client's splits, and read the files as a run reads them.

        Returns:
            Whether a run reads the same items from these files as from the division.
        """
        make_folder(folder)
        texts = self.division[client]
        splits = {split: getattr(texts, split) for split in SPLITS}
        for split, records in splits.items():
            self.write(folder / f"{split}.jsonl", records)
        read = {s: [*read_records(folder / f"{s}.jsonl", client)] for s in SPLITS}
        if not self.data.samples:
            return all(
                [r.item for r in splits[s]] == [r.text(["text"]) for r in read[s]] for s in SPLITS
            )
        bound = self.data.bound
        if self.choices is not None:
            bound = bound.model_copy(update={"choices": self.choices})
        items = items_by_split(read, self.data.model_copy(update={"kind": bound}))
        return all(
            _contents(r.item for r in splits[split]) == _contents(items[split]) for split in SPLITS
        )

    def write(self, file: Path, records: Sequence[Labelled]) -> None:
        """Write records to a file.

        Raises:
            CoterieError: A record has a value that JSON cannot represent, or the disk is full.
        """
        write_text(file, "".join(self._line(record) for record in records))

    def _line(self, record: Labelled) -> str:
        """Return a record as a line of JSON."""
        label = {self.label: record.label} if record.label else {}
        if self.data.declared is TextSpec:
            fields = {**label, "text": record.item}
        else:
            given = record.record.fields
            fields = {**label, **{name: given[name] for name in given if name in self.used}}
            fields |= {} if self.choices is None else {self.choices: [*record.item.choices]}
        try:
            line = json.dumps(fields, ensure_ascii=False, allow_nan=False)
            line.encode()
        except (TypeError, ValueError) as error:
            raise CoterieError(
                f"{record.record.where} cannot be written as JSON ({error}); convert the value to "
                "text."
            ) from error
        return f"{line}\n"


def _contents(items: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the text and the choices of each item, without its place in a file."""
    return [(item.text, item.content, getattr(item, "choices", ())) for item in items]

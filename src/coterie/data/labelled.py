"""Reading what is divided among clients: one data set with labels or without, or one per label."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.data.divide_spec import DivideSpec, SourceSpec
from coterie.data.files import Record, find_files, read_records, read_text, resolve
from coterie.data.hub import read_hub
from coterie.data.kinds.text import pieces
from coterie.data.records import items_by_split
from coterie.data.spec import DataSpec
from coterie.data.templates import holds
from coterie.errors import CoterieError


def labelled(spec: DivideSpec, data: DataSpec, root: Path) -> dict[str, list[tuple[str, Any]]]:
    """By split, the label of everything with its text, or with its sample.

    Splits are "train", which is to be divided, and those that the data set has of its own. Raises
    `CoterieError` as `instructions` does, or if a source cannot be read or holds no text.
    """
    specs = {"train": spec}
    for split in ("validation", "test"):
        if (given := getattr(spec, split)) is not None:
            local = isinstance(spec.source, str) and resolve(root, spec.source).exists()
            specs[split] = spec.model_copy(update={"source" if local else "split": given})
    if not data.samples:
        return {split: _labelled_texts(one, data, root) for split, one in specs.items()}
    found = _labelled_samples(specs, data, root)
    for split, records in found.items():
        if not records:
            raise CoterieError(f"divide: no {split} record is left; correct divide.where.")
    return found


def _labelled_texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[tuple[str, str]]:
    """The label and the text of everything that is not blank, in the source's order.

    Where each label has a source of its own, or needs none, records are kept whole and .txt files
    cut into pieces of `spec.piece` characters or more.
    """
    if isinstance(spec.source, str) and spec.by != "even":
        found = [
            (_label(record, spec.label), text)
            for record in _records(spec.source, spec, root)
            if (text := record.text(data.fields)).strip()
        ]
        return _some(found, spec.source)
    found = []
    for label, source in _sources(spec).items():
        texts = _texts(source, spec, data, root)
        found += _some([(label, text) for text in texts if text.strip()], source.source)
    return found


def _labelled_samples(
    specs: Mapping[str, DivideSpec], data: DataSpec, root: Path
) -> dict[str, list[tuple[str, Any]]]:
    """By split, the label, and prompt with answer, conversation or preference, of every record.

    Where each label has a source of its own, or needs none, a .txt file's pieces are records of
    their text and their label, and for the answers to choose from all pieces are of one source: so
    a template over `text` can ask whose it is.
    """
    spec = specs["train"]
    if isinstance(spec.source, str) and spec.by != "even":
        records = {split: _records(str(one.source), one, root) for split, one in specs.items()}
        labels = {split: [_label(r, spec.label) for r in part] for split, part in records.items()}
        return _zipped(labels, items_by_split(records, data))
    found: dict[str, list[tuple[str, Any]]] = {split: [] for split in specs}
    labels: dict[str, list[str]] = {split: [] for split in specs}
    cut: dict[str, list[Record]] = {split: [] for split in specs}
    for label in _sources(spec):
        whole: dict[str, list[Record]] = {}
        for split, one in specs.items():
            whole[split], parts = _records_and_pieces(label, _sources(one)[label], one, root)
            cut[split] += parts
            labels[split] += [label] * len(parts)
        for split, items in items_by_split(whole, data).items():
            found[split] += [(label, item) for item in items]
    asked = _zipped(labels, items_by_split(cut, data))
    return {split: found[split] + asked[split] for split in specs}


def _zipped(
    labels: Mapping[str, list[str]], items: Mapping[str, list[Any]]
) -> dict[str, list[tuple[str, Any]]]:
    return {split: list(zip(labels[split], items[split], strict=True)) for split in labels}


def _sources(spec: DivideSpec) -> dict[str, SourceSpec]:
    """Each label's source, sorted by label; one data set without labels has the label ""."""
    if isinstance(spec.source, str):
        return {"": SourceSpec(source=spec.source, subset=spec.subset)}
    return {
        label: SourceSpec(source=source) if isinstance(source, str) else source
        for label, source in sorted(spec.source.items())
    }


def _some(labelled: list[tuple[str, str]], source: str) -> list[tuple[str, str]]:
    if not labelled:
        raise CoterieError(
            f"divide: {source} has no records that contain text; name another field, or correct "
            "divide.where."
        )
    return labelled


def _records(source: str, spec: DivideSpec, root: Path) -> list[Record]:
    path = resolve(root, source)
    if not path.exists():
        return _kept(read_hub(source, spec.subset, spec.split, root), spec)
    files = find_files(path, "divide")
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"divide: {file} is plain text without labels; give .jsonl or .parquet records, "
                "name a source for each label, or list clients instead."
            )
    return _kept((record for file in files for record in read_records(file, "divide")), spec)


def _kept(records: Iterable[Record], spec: DivideSpec) -> list[Record]:
    """The records for which `divide.where` is true."""
    return [record for record in records if spec.where is None or holds(spec.where, record)]


def _label(record: Record, field: str) -> str:
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise CoterieError(
            f"{record.where}: field {field} contains {value!r}, not a label (a text or a "
            "whole number); fix the record or set divide.label."
        )
    return Record(record.where, {field: str(value)}).text([field])


def _texts(source: SourceSpec, spec: DivideSpec, data: DataSpec, root: Path) -> Iterator[str]:
    """What a source of one label holds, in parts that may go to different clients."""
    records, cut = _records_and_pieces("", source, spec, root)
    yield from (record.text(data.fields) for record in records)
    yield from (part.text(["text"]) for part in cut)


def _records_and_pieces(
    label: str, source: SourceSpec, spec: DivideSpec, root: Path
) -> tuple[list[Record], list[Record]]:
    """The records of one label's source, and the pieces of its .txt files as records."""
    path = resolve(root, source.source)
    if not path.exists():
        return _kept(read_hub(source.source, source.subset, spec.split, root), spec), []
    records: list[Record] = []
    cut: list[Record] = []
    for file in find_files(path, "divide"):
        if file.suffix.lower() != ".txt":
            records += _kept(read_records(file, "divide"), spec)
            continue
        for number, text in enumerate(pieces(read_text(file, "divide"), spec.piece), start=1):
            if text.strip():
                where = f"divide: piece {number} of {file}"
                cut.append(Record(where, {spec.label: label, "text": text}))
    return records, cut

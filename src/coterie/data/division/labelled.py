"""Reading of the data set that is divided among clients, with the labels of its records."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from coterie.data.division.spec import DivideSpec, SourceSpec
from coterie.data.files import SUFFIXES, Record, find_files, read_records, read_text, resolve
from coterie.data.kinds.text import pieces
from coterie.data.spec import DataSpec
from coterie.data.templates import holds
from coterie.data.texts import items_by_split
from coterie.errors import CoterieError


class Labelled(NamedTuple):
    """A record to divide."""

    label: str
    item: Any
    """The record's text or, for all kinds of data except plain text, the item read from it."""
    record: Record


def labelled(spec: DivideSpec, data: DataSpec, root: Path) -> dict[str, list[Labelled]]:
    """Read the data set of a run file's section `divide:`.

    Args:
        spec: The section `divide:`.
        data: The section `data:`.
        root: The folder to which relative paths refer.

    Returns:
        The records of each split. The split "train" contains the records to divide among the
        clients. The splits "validation" and "test" are present only if the data set has its own
        validation and test splits.

    Raises:
        CoterieError: A source cannot be read or has no text, or a record is invalid.
    """
    specs = {"train": spec}
    for split in ("validation", "test"):
        if (given := getattr(spec, split)) is not None:
            local = isinstance(spec.source, str) and resolve(root, spec.source).exists()
            specs[split] = spec.model_copy(update={"source" if local else "split": given})
    if not data.samples:
        return {split: _texts(split_spec, data, root) for split, split_spec in specs.items()}
    samples = _samples(specs, data, root)
    for split, records in samples.items():
        if not records:
            raise CoterieError(
                f"divide: no {split} record satisfies divide.where; correct divide.where."
            )
    return samples


def _texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[Labelled]:
    """Return all records that are not blank, in the order of the sources."""
    texts: list[Labelled] = []
    for label, source in _sources(spec).items():
        records, text_pieces = _read(label, source, spec, root)
        by_record = [(record, record.text(data.fields)) for record in records]
        by_record += [(piece, piece.text(["text"])) for piece in text_pieces]
        of_source = [
            Labelled(_label(record, spec, label), text, record)
            for record, text in by_record
            if text.strip()
        ]
        if not of_source:
            raise CoterieError(
                f"divide: {source.source} has no records that contain text; set data.text to "
                "another field, or correct divide.where."
            )
        texts += of_source
    return texts


def _samples(
    specs: Mapping[str, DivideSpec], data: DataSpec, root: Path
) -> dict[str, list[Labelled]]:
    """Return all records of each split.

    Each piece of a .txt file becomes a record that contains the text of the piece and the label of
    the file's source. The prompt can thus contain the text, and the answer can be the label.

    The pieces of all sources must be converted to items in one call, because an item's choices
    (possible answers) are by default the distinct answers of all pieces in the call. If the answer
    is the label, all pieces of one source have the same answer. A separate call for each source
    would therefore find only one possible answer.
    """
    samples: dict[str, list[Labelled]] = {split: [] for split in specs}
    text_pieces: dict[str, list[Record]] = {split: [] for split in specs}
    for label in _sources(specs["train"]):
        records: dict[str, list[Record]] = {}
        for split, spec in specs.items():
            records[split], split_pieces = _read(label, _sources(spec)[label], spec, root)
            text_pieces[split] += split_pieces
        for split, items in items_by_split(records, data).items():
            labels = [_label(record, specs[split], label) for record in records[split]]
            samples[split] += map(Labelled, labels, items, records[split])
    for split, items in items_by_split(text_pieces, data).items():
        labels = [piece.fields[specs[split].label] for piece in text_pieces[split]]
        samples[split] += map(Labelled, labels, items, text_pieces[split])
    return samples


def _sources(spec: DivideSpec) -> dict[str | None, SourceSpec]:
    """Return a mapping from each label to the source of its records, in the order of the labels.

    If the run file gives a single source for all labels, the mapping contains only this source. The
    key of this source is "" in an even division, which does not need labels. In any other division,
    the key is None, because each record contains its own label.
    """
    if isinstance(spec.source, str):
        label = "" if spec.by == "even" else None
        return {label: SourceSpec(source=spec.source, subset=spec.subset)}
    return {
        label: SourceSpec(source=source) if isinstance(source, str) else source
        for label, source in sorted(spec.source.items())
    }


def _label(record: Record, spec: DivideSpec, label: str | None) -> str:
    """Return a record's label.

    Args:
        record: The record.
        spec: The run file's section `divide:`.
        label: The label of the record's source, or None if each record contains its own label.
    """
    if label is not None:
        return label
    value = record[spec.label]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        expected = "a label (text or a whole number); fix the record or set divide.label"
        raise record.unfit(spec.label, value, expected)
    return Record(record.where, {spec.label: str(value)}).text([spec.label])


def _read(
    label: str | None, source: SourceSpec, spec: DivideSpec, root: Path
) -> tuple[list[Record], list[Record]]:
    """Read the records and text files of one source.

    Returns:
        Two lists of records. The first list contains the records that satisfy `divide.where`, from
        .jsonl and .parquet files or from a hub data set. The second list contains the pieces of
        .txt files, converted to records.
    """
    path = resolve(root, source.source)
    text_pieces: list[Record] = []

    def is_included(record: Record) -> bool:
        return spec.where is None or holds(spec.where, record)

    if not path.exists():
        hub_records = _read_hub(source.source, source.subset, spec.split, root)
        return list(filter(is_included, hub_records)), text_pieces
    records: list[Record] = []
    for file in find_files(path, "divide"):
        if file.suffix.lower() != ".txt":
            records += filter(is_included, read_records(file, "divide"))
            continue
        if label is None:
            raise CoterieError(
                f"divide: {file} is plain text without labels; give .jsonl or .parquet records, "
                "name a source for each label, or use `clients` instead of `divide`."
            )
        for number, text in enumerate(pieces(read_text(file, "divide"), spec.piece), start=1):
            if text.strip():
                where = f"divide: piece {number} of {file}"
                text_pieces.append(Record(where, {spec.label: label, "text": text}))
    return records, text_pieces


def _read_hub(name: str, subset: str | None, split: str, root: Path) -> list[Record]:
    """Read one split of a Hugging Face hub data set, from the cache or over the network.

    The data set stores class labels as numbers. These numbers are replaced with the names of the
    classes. Records without a class label are skipped.
    """
    missing = (
        f"divide: {name} is neither a file or folder under {root} nor an available data set "
        "on the hub"
    )
    remedy = (
        "set data_root to the folder of your data, or correct divide.source, divide.subset or "
        "divide.split; if this machine is offline, download the records as a file on another "
        "machine, copy the file to this machine, and set divide.source to its path"
    )
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(SUFFIXES):
        raise CoterieError(f"{missing}; {remedy}.")
    import datasets  # takes seconds to import, and is needed only for hub data sets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table = cast("datasets.Dataset", datasets.load_dataset(name, subset, split=split))
    except Exception as error:  # its class depends on the hub's client, the network and the format
        raise CoterieError(f"{missing} ({error}); {remedy}.") from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    classes = {
        field: dict(enumerate(feature.names))
        for field, feature in table.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    records: list[Record] = []
    for number, row in enumerate(cast("Iterable[dict[str, Any]]", table), start=1):
        if any(row[field] == -1 for field in classes):
            continue  # -1 marks a record without a label
        named = {field: names.get(row[field]) for field, names in classes.items()}
        records.append(Record(f"divide: record {number} of {name}", row | named))
    return records

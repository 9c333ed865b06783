"""Reading what is divided among clients: one data set with labels or without, or one per label."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from coterie.data.divide_spec import DivideSpec, SourceSpec
from coterie.data.files import SUFFIXES, Record, find_files, read_records, read_text, resolve
from coterie.data.kinds.text import pieces
from coterie.data.spec import DataSpec
from coterie.data.templates import holds
from coterie.data.texts import items_by_split
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
        return {split: _texts(one, data, root) for split, one in specs.items()}
    found = _samples(specs, data, root)
    for split, records in found.items():
        if not records:
            raise CoterieError(f"divide: no {split} record is left; correct divide.where.")
    return found


def _texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[tuple[str, str]]:
    """The label and the text of everything that is not blank, in the sources' order."""
    found: list[tuple[str, str]] = []
    for label, source in _sources(spec).items():
        records, cut = _read(label, source, spec, root)
        texts = [(record, record.text(data.fields)) for record in records]
        texts += [(part, part.text(["text"])) for part in cut]
        some = [(_label(record, spec, label), text) for record, text in texts if text.strip()]
        if not some:
            raise CoterieError(
                f"divide: {source.source} has no records that contain text; name another field, "
                "or correct divide.where."
            )
        found += some
    return found


def _samples(
    specs: Mapping[str, DivideSpec], data: DataSpec, root: Path
) -> dict[str, list[tuple[str, Any]]]:
    """By split, the label, and prompt with answer, conversation or preference, of every record.

    The pieces of .txt files are records of their text and their label, and for the answers to
    choose from all pieces are of one source: so a template over `text` can ask whose it is.
    """
    found: dict[str, list[tuple[str, Any]]] = {split: [] for split in specs}
    cut: dict[str, list[Record]] = {split: [] for split in specs}
    for label in _sources(specs["train"]):
        whole: dict[str, list[Record]] = {}
        for split, one in specs.items():
            whole[split], parts = _read(label, _sources(one)[label], one, root)
            cut[split] += parts
        for split, items in items_by_split(whole, data).items():
            labels = [_label(record, specs[split], label) for record in whole[split]]
            found[split] += zip(labels, items, strict=True)
    for split, items in items_by_split(cut, data).items():
        labels = [part.fields[specs[split].label] for part in cut[split]]
        found[split] += zip(labels, items, strict=True)
    return found


def _sources(spec: DivideSpec) -> dict[str | None, SourceSpec]:
    """Each label's source, sorted by label.

    One data set has the label "" where labels are not needed, else None: its records tell theirs.
    """
    if isinstance(spec.source, str):
        label = "" if spec.by == "even" else None
        return {label: SourceSpec(source=spec.source, subset=spec.subset)}
    return {
        label: SourceSpec(source=source) if isinstance(source, str) else source
        for label, source in sorted(spec.source.items())
    }


def _label(record: Record, spec: DivideSpec, label: str | None) -> str:
    """The label of a record's source, or else the record's own."""
    if label is not None:
        return label
    value = record[spec.label]
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        wanted = "a label (a text or a whole number); fix the record or set divide.label"
        raise record.unfit(spec.label, value, wanted)
    return Record(record.where, {spec.label: str(value)}).text([spec.label])


def _read(
    label: str | None, source: SourceSpec, spec: DivideSpec, root: Path
) -> tuple[list[Record], list[Record]]:
    """The records of a source for which `divide.where` is true; and, as records, the pieces of its
    .txt files, of `spec.piece` characters or more."""
    path = resolve(root, source.source)
    cut: list[Record] = []

    def kept(record: Record) -> bool:
        return spec.where is None or holds(spec.where, record)

    if not path.exists():
        found = _read_hub(source.source, source.subset, spec.split, root)
        return list(filter(kept, found)), cut
    records: list[Record] = []
    for file in find_files(path, "divide"):
        if file.suffix.lower() != ".txt":
            records += filter(kept, read_records(file, "divide"))
            continue
        if label is None:
            raise CoterieError(
                f"divide: {file} is plain text without labels; give .jsonl or .parquet records, "
                "name a source for each label, or list clients instead."
            )
        for number, text in enumerate(pieces(read_text(file, "divide"), spec.piece), start=1):
            if text.strip():
                where = f"divide: piece {number} of {file}"
                cut.append(Record(where, {spec.label: label, "text": text}))
    return records, cut


def _read_hub(name: str, subset: str | None, split: str, root: Path) -> list[Record]:
    """The records of one split of a data set of the Hugging Face hub, from its cache or over the
    network; numbers in class labels' fields become the classes' names."""
    missing = (
        f"divide: {name} is neither a file or folder under {root} nor an available data set "
        "on the hub"
    )
    remedy = (
        "set data_root to the folder of your data, or correct divide.source, subset or split; when "
        "offline, download the records and set divide.source to the file"
    )
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.endswith(SUFFIXES):
        raise CoterieError(f"{missing}; {remedy}.")
    import datasets  # seconds to import, and only needed here

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table = cast("datasets.Dataset", datasets.load_dataset(name, subset, split=split))
    except Exception as error:  # the kinds depend on the hub's client, the network and the format
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
            continue  # the data set's way to say that a record has no label
        named = {field: names.get(row[field]) for field, names in classes.items()}
        records.append(Record(f"divide: record {number} of {name}", row | named))
    return records

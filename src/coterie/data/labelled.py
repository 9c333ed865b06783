"""Reading what is divided among clients: one data set with labels or without, or one per label."""

from collections.abc import Iterator
from pathlib import Path

from coterie.data.examples import Instruction
from coterie.data.files import Record, find_files, read_documents, read_records, read_text, resolve
from coterie.data.hub import read_hub
from coterie.data.instructions import instructions
from coterie.data.spec import DataSpec, DivideSpec, InstructionSpec, SourceSpec
from coterie.data.texts import parts_of, pieces
from coterie.errors import CoterieError


def labelled_texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[tuple[str, str]]:
    """The label and the text of everything that is not blank, in the source's order.

    Where each label has a source of its own, or needs none, records are kept whole and .txt files
    cut into pieces of `spec.piece` characters or more. Raises `CoterieError` if a source cannot be
    read or holds no text.
    """
    if isinstance(spec.source, str) and spec.by != "even":
        labelled = [
            (_label(record, spec.label), text)
            for record in _records(spec.source, spec, root)
            if (text := record.text(data.fields)).strip()
        ]
        return _some(labelled, spec.source)
    labelled = []
    for label, source in _sources(spec).items():
        texts = _texts(source, spec, data, root)
        labelled += _some([(label, text) for text in texts if text.strip()], source.source)
    return labelled


def labelled_instructions(
    spec: DivideSpec, how: InstructionSpec, root: Path
) -> list[tuple[str, Instruction]]:
    """The label, and prompt with answer, of every record.

    Where each label has a source of its own, or needs none, a .txt file's pieces are records of
    their text and their label, and for the answers to choose from all pieces are of one source: so
    a template over `text` can ask whose it is. Raises `CoterieError` as `instructions` does, or if
    a source cannot be read.
    """
    if isinstance(spec.source, str) and spec.by != "even":
        records = _records(spec.source, spec, root)
        labels = [_label(record, spec.label) for record in records]
        return list(zip(labels, instructions(records, how), strict=True))
    labelled: list[tuple[str, Instruction]] = []
    cut: list[tuple[str, Record]] = []
    for label, source in _sources(spec).items():
        records, parts = _records_and_pieces(label, source, spec, root)
        labelled += [(label, item) for item in instructions(records, how)]
        cut += [(label, part) for part in parts]
    items = instructions([part for _, part in cut], how)
    return labelled + [(label, item) for (label, _), item in zip(cut, items, strict=True)]


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
        raise CoterieError(f"divide: the records of {source} contain no text; name another field.")
    return labelled


def _records(source: str, spec: DivideSpec, root: Path) -> list[Record]:
    path = resolve(root, source)
    if not path.exists():
        return read_hub(source, spec.subset, spec.split, root)
    files = find_files(path, "divide")
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"divide: {file} is plain text without labels; give .jsonl or .parquet records, "
                "name a source for each label, or list clients instead."
            )
    return [record for file in files for record in read_records(file, "divide")]


def _label(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str | int) or value == "":
        raise CoterieError(
            f"{record.where}: field {field} contains {value!r}, not a label (a text or a "
            "whole number); fix the record or set divide.label."
        )
    return str(value)


def _texts(source: SourceSpec, spec: DivideSpec, data: DataSpec, root: Path) -> Iterator[str]:
    """What a source of one label holds, in parts that may go to different clients."""
    if resolve(root, source.source).exists():
        for document in read_documents(root, source.source, data.fields, "divide"):
            yield from parts_of(document, spec.piece)
    else:
        for record in read_hub(source.source, source.subset, spec.split, root):
            yield record.text(data.fields)


def _records_and_pieces(
    label: str, source: SourceSpec, spec: DivideSpec, root: Path
) -> tuple[list[Record], list[Record]]:
    """The records of one label's source, and the pieces of its .txt files as records."""
    path = resolve(root, source.source)
    if not path.exists():
        return read_hub(source.source, source.subset, spec.split, root), []
    records: list[Record] = []
    cut: list[Record] = []
    for file in find_files(path, "divide"):
        if file.suffix.lower() != ".txt":
            records += read_records(file, "divide")
            continue
        for number, text in enumerate(pieces(read_text(file, "divide"), spec.piece), start=1):
            if text.strip():
                where = f"divide: piece {number} of {file}"
                cut.append(Record(where, {spec.label: label, "text": text}))
    return records, cut

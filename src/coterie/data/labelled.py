"""Reading the labelled texts that are divided among clients: one data set, or one per label."""

from collections.abc import Iterator
from pathlib import Path

from coterie.data.files import Record, find_files, read_documents, read_records, resolve
from coterie.data.hub import read_hub
from coterie.data.spec import DataSpec, DivideSpec, SourceSpec
from coterie.data.texts import parts_of
from coterie.errors import CoterieError


def labelled_texts(spec: DivideSpec, data: DataSpec, root: Path) -> list[tuple[str, str]]:
    """The label and the text of everything that is not blank, in the source's order.

    Where each label has a source of its own, records are kept whole and .txt files cut into pieces
    of about 2,000 characters. Raises `CoterieError` if a source cannot be read or holds no text.
    """
    if isinstance(spec.source, str):
        labelled = [
            (_label(record, spec.label), text)
            for record in _records(spec.source, spec, root)
            if (text := record.text(data.fields)).strip()
        ]
        return _some(labelled, spec.source)
    labelled = []
    for label, source in sorted(spec.source.items()):
        source = SourceSpec(source=source) if isinstance(source, str) else source
        texts = _texts(source, spec, data, root)
        labelled += _some([(label, text) for text in texts if text.strip()], source.source)
    return labelled


def _some(labelled: list[tuple[str, str]], source: str) -> list[tuple[str, str]]:
    if not labelled:
        raise CoterieError(f"divide: the records of {source} hold no text; name another field.")
    return labelled


def _records(source: str, spec: DivideSpec, root: Path) -> list[Record]:
    path = resolve(root, source)
    if not path.exists():
        return read_hub(source, spec.subset, spec.split, spec.label, root)
    files = find_files(path, "divide")
    for file in files:
        if file.suffix.lower() == ".txt":
            raise CoterieError(
                f"divide: {file} is plain text, which has no labels to divide by; give .jsonl or"
                " .parquet records, name a source for each label, or list clients instead."
            )
    return [record for file in files for record in read_records(file, "divide")]


def _label(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str | int) or value == "":
        raise CoterieError(
            f"{record.where}: field {field} holds {value!r} rather than a label (a text or a whole"
            " number); mend the record or set divide.label."
        )
    return str(value)


def _texts(source: SourceSpec, spec: DivideSpec, data: DataSpec, root: Path) -> Iterator[str]:
    """What a source of one label holds, in parts that may go to different clients."""
    if resolve(root, source.source).exists():
        for document in read_documents(root, source.source, data.fields, "divide"):
            yield from parts_of(document)
    else:
        for record in read_hub(source.source, source.subset, spec.split, spec.label, root):
            yield record.text(data.fields)

"""Files of texts and records, and values of records that are no text."""

import datetime
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest

from coterie.data.files import Record, find_files, read_records
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import InstructionSpec
from coterie.data.texts import field_records, read_documents
from coterie.errors import CoterieError


def read(root: Path, source: str, fields: tuple[str, ...] = ("text",)) -> list[str]:
    return ["".join(parts) for parts in read_documents(root, source, fields, "Client anna")]


def write_lines(file: Path, *records: object) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_text_file_is_one_document_exactly(tmp_path: Path) -> None:
    text = "Zwei\r\nZeilen,\n\n\u2028 你好 👩‍👩‍👧\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read(tmp_path, "a.txt") == [text]
    assert read(Path("elsewhere"), str(tmp_path / "a.txt")) == [text]
    (tmp_path / "a.txt").write_bytes(text.encode("utf-8-sig"))
    assert read(tmp_path, "a.txt") == [text]


def test_records_of_both_formats_read_alike(tmp_path: Path) -> None:
    records = [{"title": f"T\u2028{i}", "body": f"你好 {i}", "label": i} for i in range(20)]
    write_lines(tmp_path / "a.jsonl", *records)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    wanted = [f"T\u2028{i}\n你好 {i}" for i in range(20)]
    assert read(tmp_path, "a.jsonl", ("title", "body")) == wanted
    assert read(tmp_path, "a.parquet", ("title", "body")) == wanted


def test_blank_records_and_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": " "}\n{"text": "two"}')
    assert read(tmp_path, "a.jsonl") == ["one", "two"]


def test_a_folder_is_read_by_name_without_hidden_or_other_files(tmp_path) -> None:
    names = ["b.txt", "a/z.TXT", "a/notes.md", ".git/x.txt", "a/.y.txt", "c.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "json"}' if name.endswith("l") else name)
    assert read(tmp_path, ".") == ["a/z.TXT", "b.txt", "json"]
    assert find_files(tmp_path / "b.txt", "Client anna") == [tmp_path / "b.txt"]


FIELDS = r"no field text \(did you mean texts\?\); its fields are: texts, id\. Correct"
NO_RECORDS = b"a table without rows"


UNUSABLE_FILES = [
    ("gone.txt", None, r"there is no file or folder .*gone\.txt"),
    ("empty.txt", b" \n", r"empty\.txt is empty; add text"),
    ("zip.txt", b"PK\0\1", r"zip\.txt is not text \(it contains NUL bytes\); export"),
    ("latin.txt", "né".encode("latin-1"), r"latin\.txt is not UTF-8 \(at byte 1\); save it"),
    ("bom.txt", b"\xef\xbb\xbfab\xff", r"not UTF-8 \(at byte 5\)"),
    ("notes.docx", b"text", r"notes\.docx is not a \.txt, \.jsonl or \.parquet file; convert"),
    ("bad.jsonl", b'{"text": "a"}\n{"text": }', r"line 2 of .*bad\.jsonl is not valid JSON"),
    ("list.jsonl", b'["a"]', r"line 1 of .*list\.jsonl is not a JSON object"),
    ("empty.jsonl", b"\n\n", r"empty\.jsonl is empty"),
    ("field.jsonl", b'{"texts": "a", "id": 1}', FIELDS),
    ("none.jsonl", b"{}", r"line 1 of .* has no field text; its fields are: none"),
    ("null.jsonl", b'{"text": null}', r"field text contains NoneType, not text"),
    ("half.jsonl", b'{"text": "ab\\ud83d"}', r"half a character .* at character 2"),
    ("none.parquet", NO_RECORDS, r"none\.parquet has no records"),
    ("notes.md", b"text", r"no \.txt, \.jsonl or \.parquet file \(it has 1 \.md\); add"),
    ("broken.parquet", b"PAR1", r"broken\.parquet cannot be read as Parquet"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), UNUSABLE_FILES)
def test_what_cannot_be_used_is_named_with_a_remedy(tmp_path, name, content, sentence) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if content is NO_RECORDS:
        table = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / name)
    with pytest.raises(CoterieError, match=f"^Client anna: .*{sentence}"):
        read(tmp_path, "." if name == "notes.md" else name)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(CoterieError, match="check its permissions"):
        read(tmp_path, "a.txt")


SPEC = InstructionSpec(template="alpaca")


def written(folder: Path, line: str) -> list[Record]:
    (folder / "a.jsonl").write_text(line, encoding="utf-8")
    return field_records(folder, "a.jsonl", "Ada")


ANSWERS = ["NaN", "Infinity", "-Infinity", "1e999", "null", "true", "{}"]
VALUES = [
    *((f'"x", "output": {value}', "field output contains") for value in ANSWERS),
    *((f'{value}, "output": "y"', "") for value in ("NaN", "1e999", "true", '{"a": 1}', "[1]")),
    ('null, "output": "y"', ".* has null in the field instruction"),
]


@pytest.mark.parametrize(("values", "sentence"), VALUES)
def test_a_value_that_is_neither_text_nor_a_finite_number_is_refused(
    tmp_path, values, sentence
) -> None:
    records = written(tmp_path, f'{{"input": "", "instruction": {values}}}')
    with pytest.raises(CoterieError, match=f"line 1 of .*{sentence}"):
        instructions(records, SPEC)


def test_a_date_is_no_text() -> None:
    row = {"instruction": datetime.date.today(), "input": "", "output": "y"}
    with pytest.raises(CoterieError, match=r"it prints datetime\.date"):
        instructions([Record("Ada: record 1", row)], SPEC)


@pytest.mark.parametrize(
    "value", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000], ids=["lists", "mappings", "digits"]
)
def test_json_that_python_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(CoterieError, match=r"line 1 of .* cannot be read"):
        written(tmp_path, f'{{"text": {value}')


INVALID = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
LATE = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())


@pytest.mark.parametrize("column", [INVALID, LATE])
def test_a_column_that_cannot_be_decoded_is_refused_if_it_is_used(tmp_path, column) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["fine"], "other": column}), file)
    [record] = read_records(file, "Ada")
    assert record.text(["text"]) == "fine"
    with pytest.raises(CoterieError, match="field other cannot be read"):
        record.text(["other"])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    table = pyarrow.Table.from_arrays(columns, ["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(CoterieError, match="two columns with the same name"):
        list(read_records(tmp_path / "a.parquet", "Ada"))

"""Values of records that are no text, and files that cannot be read."""

import datetime
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from coterie.data.files import Record, read_records
from coterie.data.kinds.instructions import instructions
from coterie.data.spec import InstructionSpec
from coterie.data.texts import field_records
from coterie.errors import CoterieError

SPEC = InstructionSpec(template="alpaca")


def written(folder: Path, line: str) -> list[Record]:
    (folder / "a.jsonl").write_text(line, encoding="utf-8")
    return field_records(folder, "a.jsonl", "Ada")


ANSWERS = ["NaN", "Infinity", "-Infinity", "1e999", "null", "true", "{}"]
FIELDS = [
    *((f'"x", "output": {value}', "field output contains") for value in ANSWERS),
    *((f'{value}, "output": "y"', "") for value in ("NaN", "1e999", "true", '{"a": 1}', "[1]")),
    ('null, "output": "y"', ".* has null in the field instruction"),
]


@pytest.mark.parametrize(("values", "sentence"), FIELDS)
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

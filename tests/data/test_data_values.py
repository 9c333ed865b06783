"""Values of records that are no text, and files that cannot be read."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from coterie.data.division.divide import divided_texts
from coterie.data.division.labelled import labelled
from coterie.data.division.spec import DivideSpec
from coterie.data.files import Record, read_records
from coterie.data.kinds.instructions import instructions
from coterie.data.kinds.preferences import preferences
from coterie.data.spec import DataSpec, InstructionSpec, PreferenceSpec
from coterie.data.texts import field_records
from coterie.errors import CoterieError

SPEC = InstructionSpec(template="alpaca")
ROW = {"instruction": "Add.", "input": "", "output": "y"}


def written(folder: Path, line: str) -> list[Record]:
    (folder / "a.jsonl").write_text(line, encoding="utf-8")
    return field_records(folder, "a.jsonl", "Ada")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "null", "true", "{}"])
def test_an_answer_is_a_text_or_a_finite_number(tmp_path: Path, value: str) -> None:
    records = written(tmp_path, f'{{"instruction": "x", "input": "", "output": {value}}}')
    with pytest.raises(CoterieError, match=r"line 1 of .*field output contains"):
        instructions(records, SPEC)


@pytest.mark.parametrize("value", ["NaN", "1e999", "true", '{"a": 1}', "[1]"])
def test_a_template_prints_no_python_expression(tmp_path: Path, value: str) -> None:
    records = written(tmp_path, f'{{"instruction": {value}, "input": "", "output": "y"}}')
    with pytest.raises(CoterieError, match="line 1 of"):
        instructions(records, SPEC)


def test_null_is_said_to_be_null(tmp_path: Path) -> None:
    records = written(tmp_path, '{"instruction": null, "input": "", "output": "y"}')
    with pytest.raises(CoterieError, match=r"line 1 of .* has null in the field instruction"):
        instructions(records, SPEC)


def test_a_date_is_no_text() -> None:
    with pytest.raises(CoterieError, match=r"it prints datetime\.date"):
        instructions([Record("Ada: record 1", {**ROW, "instruction": datetime.date.today()})], SPEC)


@pytest.mark.parametrize(
    "value", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000], ids=["lists", "mappings", "digits"]
)
def test_json_that_python_cannot_hold_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(CoterieError, match=r"line 1 of .* cannot be read"):
        written(tmp_path, f'{{"text": {value}')


INVALID = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
LATE = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())


@pytest.mark.parametrize("column", [INVALID, LATE])
def test_a_column_that_cannot_be_decoded_is_refused_if_it_is_used(
    tmp_path: Path, column: Any
) -> None:
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


def test_a_preference_without_a_field_is_not_told_to_rename_it_in_the_run_file() -> None:
    with pytest.raises(CoterieError, match="the run file cannot change these names"):
        preferences([Record("Ada: line 1", {"prompt": "a", "chosen": "b"})], PreferenceSpec())


BY_LABEL = DivideSpec(source="l.jsonl", by="label")


@pytest.mark.parametrize("label", ['" "', "true", '"\\ud800"', "NaN"])
def test_what_is_no_label_is_refused(tmp_path: Path, label: str) -> None:
    (tmp_path / "l.jsonl").write_text(f'{{"text": "words", "label": {label}}}')
    with pytest.raises(CoterieError, match="line 1 of"):
        labelled(BY_LABEL, DataSpec(), tmp_path)


def test_negative_labels_have_clients_of_their_own(tmp_path: Path) -> None:
    lines = [f'{{"text": "words {n}", "label": {n % 3 - 1}}}' for n in range(60)]
    (tmp_path / "l.jsonl").write_text("\n".join(lines))
    found = divided_texts(BY_LABEL, DataSpec(), tmp_path, 0)
    assert set(found) == {"minus-1", "0", "1"}

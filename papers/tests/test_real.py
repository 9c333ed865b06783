"""The order in which the tables of recipes/real are measured, and the script that measures them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie import CoterieError
from reproduce import real
from reproduce.pages import page_name
from reproduce.tables import compare_table, load_table

RECIPES = real.ROOT / "recipes" / "real"


def test_the_listed_cells_are_forty_runs_and_cover_every_row() -> None:
    listed = [(entry.table, *cell) for entry in real.entries() for cell in entry.cells]
    assert len(set(listed)) == len(listed)
    runs, rows = set(), set()
    for path in RECIPES.glob("*.yaml"):
        _, columns = load_table(path)
        cells = {column.spec.name: column.cells for column in columns}
        rows |= {(path.stem, row) for column in columns for row in column.cells}
        runs |= {
            (table, column, cells[column][row].model_copy(update={"seed": seed}).digest())
            for table, column, row, seed in listed
            if table == path.stem
        }
    assert len(runs) == 40
    assert {(table, row) for table, _, row, _ in listed} == rows


def test_the_tables_to_run_can_be_chosen() -> None:
    chosen = real.entries(tables=["fedmkt"])
    assert {entry.table for entry in chosen} == {"fedmkt"}
    assert chosen == [entry for entry in real.entries() if entry.table == "fedmkt"]


def test_two_claims_have_three_seeds() -> None:
    listed = [(entry.table, *cell[:2]) for entry in real.entries() for cell in entry.cells]
    often = {cell for cell, count in Counter(listed).items() if count > 1}
    assert often == {
        ("comigs-table4", "AG News", "comigs-1g1s"),
        ("comigs-table4", "AG News", "comigs-tr"),
        ("pcl-table4", "Codes-Wiki high", "pcl-2"),
        ("pcl-table4", "Codes-Wiki high", "pcl-3"),
    }


@pytest.fixture
def folder(values, tmp_path, monkeypatch) -> Path:
    """Writes a table file, and makes its folder's parent the current folder."""
    run: dict[str, Any] = values(rounds=1)
    del run["method"]
    file = {
        "table": "A real table",
        "run": run,
        "columns": [{"name": "Texts"}],
        "rows": [{"method": "pretrained"}, {"method": "local"}, {"method": "fedavg"}],
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "table.yaml").write_text(yaml.safe_dump(file))
    return tmp_path / "real"


def test_cells_are_run_in_the_listed_order_and_kept(folder, texts, tmp_path) -> None:
    order = [
        real.Entry(table="table", column="Texts", rows=("fedavg",), seed=1),
        real.Entry(table="table", column="Texts", rows=("pretrained", "fedavg")),
    ]

    def measure() -> tuple[list[Any], list[str]]:
        messages: list[str] = []
        summaries = list(real.measured(order, texts, folder, report=messages.append))
        return summaries, [text for text in messages if text.startswith("Run ")]

    summaries, messages = measure()
    seeds = [
        {row["row"]: row["seeds"] for row in summary["columns"][0]["rows"]} for summary in summaries
    ]
    assert seeds == [
        {"pretrained": 0, "local": 0, "fedavg": 1},
        {"pretrained": 1, "local": 0, "fedavg": 1},
        {"pretrained": 1, "local": 0, "fedavg": 2},
    ]
    assert [text for text in messages if "already" not in text] == [
        "Run 1 of 1: fedavg-seed1",
        "Run 1 of 2: pretrained-seed0",
        "Run 2 of 3: fedavg-seed0",
    ]
    assert page_name(summaries[-1]) == "real-table"
    assert len(list((tmp_path / "runs" / "real-table" / "texts").iterdir())) == 3
    again, messages = measure()
    assert again == summaries
    assert all("already finished" in text for text in messages)


def test_a_cell_that_the_table_does_not_have_is_refused(folder) -> None:
    with pytest.raises(CoterieError, match=r"no cell Texts, comigs with the seed 0\.$"):
        compare_table(folder / "table.yaml", only=[("Texts", "comigs", 0)])

"""Every page in papers/results is what its result file gives, and every file has its page."""

import json
from pathlib import Path

import pytest

from reproduce.pages import page_name, pages
from reproduce.table_file import is_table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results"
PAGES = pages(FOLDER)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_its_result_file_gives(path) -> None:
    behind = "the page is not what its result file gives; run `python -m reproduce.drawing`"
    assert path.exists(), behind
    assert path.read_text(encoding="utf-8") == PAGES[path], behind


def test_every_page_has_a_result_file() -> None:
    assert set(FOLDER.glob("*.md")) == PAGES.keys() | {FOLDER / "figures.md"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_a_result_file_is_named_after_its_table_file(path) -> None:
    summary = json.loads(path.read_text(encoding="utf-8"))
    assert page_name(summary) == path.stem
    assert is_table(ROOT / summary["file"])

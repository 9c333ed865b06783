"""Bring the table of keys in docs/use/run-file.md up to date with the models that it describes."""

import re
from pathlib import Path

from coterie.analysis.settings import run_file_keys

PAGE = Path(__file__).parents[1] / "docs" / "use" / "run-file.md"

if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    start, end = page.index("**Every key**"), re.search(r"\n\n(?=## )", page)
    assert end is not None, "a section follows the table"
    PAGE.write_text(page[:start] + run_file_keys() + page[end.end() - 1 :], encoding="utf-8")

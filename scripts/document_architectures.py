"""Bring the table at the end of docs/use/bases.md up to date with where adapters stand."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "use" / "bases.md"
sys.path.insert(0, str(ROOT / "tests"))

from architectures import table  # noqa: E402

if __name__ == "__main__":
    before, _, _ = PAGE.read_text(encoding="utf-8").partition("| architecture |")
    PAGE.write_text(before + table(), encoding="utf-8")

"""Bring the table of docs/use/architectures.md up to date with where adapters stand."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "use" / "architectures.md"
sys.path.insert(0, str(ROOT / "tests"))

from architectures import table  # noqa: E402

if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("| architecture |")
    after = rest[rest.index("\n\n") + 1 :]
    PAGE.write_text(before + table() + after, encoding="utf-8")

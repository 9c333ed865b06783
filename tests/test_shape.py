"""No file is longer than a person reads at once, and no function longer than a screen."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("src", "reproduce", "tests", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < LONGEST_FUNCTION, node.name

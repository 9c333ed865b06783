"""Files can be read in one sitting, functions (without docstrings) fit on a screen, and chains of
package imports are short enough to follow."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_CHAIN = 400, 60, 14


def long_parts(path: Path) -> Iterator[str]:
    """Yield the file if it is too long, and its functions that are too long."""
    text = path.read_text(encoding="utf-8")
    length = len(text.splitlines())
    if length > LONGEST_FILE:
        yield f"{path}: {length} lines"
    for node in ast.walk(ast.parse(text)) if length > LONGEST_FUNCTION else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = (node.end_lineno or 0) - node.lineno - docstring.count("\n")
            if lines >= LONGEST_FUNCTION:
                yield f"{path}: {node.name}: {lines} lines"


@pytest.mark.parametrize("folder", ["src", "papers", "tests", "benchmarks", "scripts"])
def test_files_and_functions_are_short(folder) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert not [part for path in files for part in long_parts(path)]


def test_the_longest_chain_of_package_imports_is_short() -> None:
    graph = grimp.build_graph("coterie", cache_dir=None)
    packages = graph.find_children("coterie") - {"coterie.__main__"}
    below: dict[str, set[str]] = {}
    for package in packages:
        graph.squash_module(package)
    for package in packages:
        below[package] = (graph.find_modules_directly_imported_by(package) & packages) - {package}

    @cache
    def longest(package: str) -> tuple[str, ...]:
        chains = map(longest, sorted(below[package]))
        return package, *max(chains, key=len, default=())

    chain = max(map(longest, sorted(below)), key=len)
    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)

"""Files can be read in one sitting, functions (without docstrings) fit on a screen, and chains of
package imports are short enough to follow."""

import ast
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path
    for folder in ("src", "papers", "tests", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_CHAIN = 400, 60, 14


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno - docstring.count("\n")
            assert lines < LONGEST_FUNCTION, node.name


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

"""Names of metrics are declared once: nobody who records or reads them spells one."""

import ast
from collections.abc import Iterator
from pathlib import Path

from coterie.messages import names

ROOT = Path(__file__).parent.parent.parent
FILES = [
    p for folder in ("src", "papers/reproduce", "benchmarks") for p in (ROOT / folder).rglob("*.py")
]
BEGIN = tuple(v for k, v in vars(names).items() if k.isupper() and v.endswith("/"))
"""Beginnings of names; a slash distinguishes them from other words."""
TAKE = {"log", "names", "by_client", "by_round", "recorded"}
"""Functions and methods that take a name of a metric first, or second."""


def spelt(tree: ast.AST) -> Iterator[str]:
    """Yield names of metrics that are literals where they are used."""
    for node in ast.walk(tree):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = node.args[:2] if called in TAKE else []  # a client may come first
        elif isinstance(node, ast.Compare) and ast.unparse(node.left) == "line['name']":
            given = node.comparators
        elif isinstance(node, ast.Constant) and str(node.value).startswith(BEGIN):
            given = [node]
        for argument in given:
            parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
            first = parts[0] if parts else argument
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"line {argument.lineno}: {ast.unparse(argument)}"


def test_nobody_spells_a_metric_s_name() -> None:
    declared = Path(names.__file__)
    assert [
        f"{path.relative_to(ROOT)}, {name}"
        for path in FILES
        if path != declared
        for name in spelt(ast.parse(path.read_text(encoding="utf-8")))
    ] == []


def test_names_that_are_spelt_are_found() -> None:
    code = """
context.log("trust", row)
context.log(f"trust/{layer}", row)
run.names("trust")
found = line["name"] == "trust"
found = name.startswith("loss/")
context.log(TRUST, row)
found = line["name"] == f"{LOSS}joint"
"""
    assert {text.split(":")[0] for text in spelt(ast.parse(code))} == {
        f"line {n}" for n in range(2, 7)
    }

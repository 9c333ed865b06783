"""Draw docstrings and user-facing sentences of the package, for a reader to judge.

    python scripts/sample_sentences.py [SEED]

Prints 60 docstrings of functions and classes, each after the file, the qualified name and the
arguments, and 60 texts of five words or more that are no docstring: messages, option helps,
headings, footnotes. Expressions of f-strings are printed as they are written in the source.
"""

import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "coterie"
SAMPLE = 60
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of each file, in the order of paths."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def docstrings(tree: ast.AST, prefix: str) -> Iterator[str]:
    """Yield each docstring of a file, after a signature that begins with a prefix."""
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, Documented):
            inner = f"{prefix}{node.name}."
            if docstring := ast.get_docstring(node):
                takes = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                yield f"{prefix}{node.name}{takes}\n{docstring}"
        yield from docstrings(node, inner)


def texts(tree: ast.AST, _prefix: str) -> Iterator[str]:
    """Yield each text of a file that is an argument or a value, not a docstring."""
    statements = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    inner = {id(p) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for p in n.values}
    for node in ast.walk(tree):
        if id(node) in statements | inner:
            continue
        match node:
            case ast.Constant(value=str(text)):
                pass
            case ast.JoinedStr(values=parts):
                text = "".join(
                    str(p.value) if isinstance(p, ast.Constant) else ast.unparse(p) for p in parts
                )
            case _:
                continue
        if len(re.findall(r"[A-Za-z]{2,}", text)) >= 5 and " " in text.strip():
            yield text


if __name__ == "__main__":
    chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 24680)
    for title, find in (("Docstrings", docstrings), ("User-facing texts", texts)):
        population = [text for path, tree in trees() for text in find(tree, f"{path} ")]
        print(f"# {title}: {SAMPLE} of {len(population)}\n")
        for number, text in enumerate(chance.sample(population, SAMPLE), 1):
            print(f"{number}. {text}\n")

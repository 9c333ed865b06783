"""Rules of our English that a program can check; `python tests/language.py PATH` lists breaches."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

import coterie

SOURCE = Path(coterie.__file__).parent
ENGLISH = yaml.safe_load((Path(__file__).parent / "english.yaml").read_text())
VERBS, OPENERS, NAMES = (frozenset(ENGLISH[k].split()) for k in ("verbs", "openers", "names"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
PROPERTIES = {"property", "cached_property", "computed_field", "setter", "fixture"}


def breaches(path: Path) -> Iterator[str]:
    """Yield what breaks a rule in a file, each with its line."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        for name in names_in(node):
            if name.strip("_") in NAMES:
                yield f"{line}: the name {name!r} does not say what it holds"
        for owner, docstring in docstrings_in(node):
            for entry in lower_case_entries(docstring):
                yield f"{line}: {owner}: the description of {entry} begins with a small letter"
            first = docstring.split()[0].strip(".,:;`*") if docstring.strip() else ""
            if isinstance(node, Function) and not is_property(node):
                if first not in VERBS:
                    yield f"{line}: {owner}: {first!r} is not in english.yaml"
            elif first in OPENERS or docstring.startswith("The same"):
                yield f"{line}: {owner}: a docstring does not begin with {first!r}"


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: functions, classes, arguments and variables."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case _:
            pass


def docstrings_in(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a node: its own, and those under variables of its body."""
    documented = isinstance(node, Function | ast.ClassDef | ast.Module)
    if documented and (docstring := ast.get_docstring(node)):
        yield getattr(node, "name", "module"), docstring
    if isinstance(node, ast.ClassDef | ast.Module):
        for before, after in zip(node.body, node.body[1:], strict=False):
            match before, after:
                case (
                    ast.Assign() | ast.AnnAssign(),
                    ast.Expr(value=ast.Constant(value=str(docstring))),
                ):
                    yield ast.unparse(before).split("=")[0].split(":")[0].strip(), docstring
                case _:
                    pass


def lower_case_entries(docstring: str) -> Iterator[str]:
    """Yield the arguments whose description begins with a small letter."""
    arguments = re.search(r"^Args:\n((?: .*\n|\n)+)", f"{docstring}\n", flags=re.MULTILINE)
    if arguments:
        yield from re.findall(r"^ {4}\*{0,2}(\w+): [a-z]", arguments[1], flags=re.MULTILINE)


def is_property(function: Function) -> bool:
    """Return whether a function is read like an attribute."""
    names = (ast.unparse(d).split("(")[0].split(".")[-1] for d in function.decorator_list)
    return not PROPERTIES.isdisjoint(names)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        given = Path(argument)
        for file in sorted(given.rglob("*.py")) if given.is_dir() else [given]:
            for breach in breaches(file):
                print(f"{file}:{breach}")

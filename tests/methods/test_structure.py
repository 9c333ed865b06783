"""The structure of methods: they are composed rather than inherited, and parse no names."""

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import coterie.methods
from coterie.methods.contract import ClientSide, Method, Server

NAMES = {"registry.py"}
"""Files that find methods by their names, and are none themselves."""
ROOT = Path(coterie.methods.__path__[0])
FILES = [f for f in sorted(ROOT.rglob("*.py")) if f.name not in {*NAMES, "low_rank.py"}]
PARSING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}
PARSING |= {"fnmatch", "fnmatchcase"}
MEANS = {"PaddedMean", "LowRankSum"}
"""The classes of low_rank.py that a method may use, because a schema cannot average over ranks."""


def classes() -> list[type]:
    """Return all classes that a file of the package defines."""
    infos = pkgutil.walk_packages(coterie.methods.__path__, "coterie.methods.")
    modules = [importlib.import_module(info.name) for info in infos]
    return [
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
    ]


def away(kind: type, root: type) -> int:
    """Return the length of the longest path of bases from a class to an ancestor."""
    if kind is root:
        return 0
    return 1 + max(away(base, root) for base in kind.__bases__ if issubclass(base, root))


@pytest.mark.parametrize("root", [Method, ClientSide, Server])
def test_nothing_is_more_than_three_classes_away_from_the_contract(root: type) -> None:
    distances = {kind.__name__: away(kind, root) for kind in classes() if issubclass(kind, root)}
    assert len(distances) > 3
    assert {name: steps for name, steps in distances.items() if steps > 3} == {}


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_no_method_parses_names_or_keeps_a_mean(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imported = {
        (getattr(node, "module", None) or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not used & PARSING
    assert not {"fnmatch", "re"} & {name for pair in imported for name in pair}
    assert "weighted_mean" not in used
    kept = {
        name
        for module, name in imported
        if name == "weighted_mean" or name.endswith(("Mean", "Sum"))
        if not (module == "coterie.methods.low_rank" and name in MEANS)
    }
    assert not kept
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert not {name for name in own if "Mean" in name}

"""The English of docstrings and names, as far as a program can check it."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from language import SOURCE, breaches

import coterie
from coterie.methods.sides import ClientSide, Server
from coterie.network.link import Link

ROOT = Path(__file__).parents[1]
PACKAGES = sorted({p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py")} - {"assets"})
FOLDERS = ("benchmarks", "examples", "papers/reproduce", "papers/tests", "scripts", "tests")
LONGEST_NAME = 12
"""The largest number of words after `test_` in the name of a test."""


def files_of(package: str) -> list[Path]:
    """Return the files of a package, of a module of its own, or of another folder."""
    path = SOURCE / package if package in PACKAGES else ROOT / package
    if path.is_file():
        return [path]
    return sorted(path.rglob("*.py"))


@pytest.mark.parametrize("package", [*PACKAGES, *FOLDERS])
def test_docstrings_and_names_keep_to_the_rules(package: str) -> None:
    broken = [f"{file}:{line}" for file in files_of(package) for line in breaches(file)]
    assert not broken, "\n".join(broken)


def classes(package: str) -> Iterator[type[Any]]:
    for file in files_of(package):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        module = import_module(".".join(parts).removesuffix(".__init__"))
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                yield kind


@pytest.mark.parametrize("package", [*PACKAGES, *FOLDERS])
def test_names_of_tests_are_short(package: str) -> None:
    names = [
        f"{file}:{node.lineno}: {node.name}"
        for file in files_of(package)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and node.name.count("_") > LONGEST_NAME
    ]
    assert not names, "\n".join(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_method_is_documented_where_it_is_declared(package: str) -> None:
    wrong = []
    for kind in classes(package):
        for name, function in vars(kind).items():
            function = inspect.unwrap(getattr(function, "fget", None) or function)
            if not inspect.isfunction(function) or name.startswith("_"):
                continue
            if function.__name__ == "<lambda>":  # the default of a field
                continue
            above = [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]
            modules = [getattr(f, "__module__", None) or "" for f in above]
            ours = [f for f, m in zip(above, modules, strict=True) if m.startswith("coterie")]
            if bool(function.__doc__) == bool([f for f in ours if f.__doc__]) and not (
                above and not ours and not function.__doc__
            ):
                how = "repeats the docstring of a base class" if function.__doc__ else "has none"
                wrong.append(f"{kind.__module__}.{kind.__qualname__}.{name} {how}")
    assert not wrong, "\n".join(wrong)


Function = Callable[..., Any]
CLASSES = [kind for kind in map(coterie.__getattr__, coterie.__all__) if inspect.isclass(kind)]


def methods(kind: type[Any]) -> Iterator[Function]:
    """Yield the public methods that a class defines, without properties."""
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", member)  # of a class method
        if not name.startswith("_") and inspect.isfunction(function):
            yield function


def public_functions() -> Iterator[Function]:
    """Yield the functions and methods that users and authors of plugins call or override."""
    yield from (f for f in map(coterie.__getattr__, coterie.__all__) if inspect.isfunction(f))
    for kind in (*CLASSES, ClientSide, Server, Link):
        yield from methods(kind)


def sections(docstring: str) -> dict[str, str]:
    """Return the sections of a docstring by heading: Args, Returns, ..."""
    parts = re.split(r"^(Args|Returns|Yields|Raises):\n", inspect.cleandoc(docstring), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> set[str]:
    """Return the names that a section describes, each on a line of its own."""
    return set(re.findall(r"^ {4}\*{0,2}(\w+):", section, flags=re.M))


def raised(function: Function) -> set[str]:
    """Return the names of the exceptions that the body raises, except for abstract methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    errors = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    names = {ast.unparse(e.func if isinstance(e, ast.Call) else e) for e in errors}
    return names - {"NotImplementedError"}


def missing(function: Function) -> Iterator[str]:
    """Yield what the docstring of a function does not describe, or describes in vain."""
    described = sections(function.__doc__ or "")
    parameters = set(inspect.signature(function).parameters) - {"self", "cls"}
    for name in sorted(parameters ^ entries(described.get("Args", ""))):
        yield f"Args: {name}"
    returned = inspect.get_annotations(function).get("return")
    if returned not in (None, "None") and not {"Returns", "Yields"} & described.keys():
        yield "Returns"
    for name in sorted(raised(function) - entries(described.get("Raises", ""))):
        yield f"Raises: {name}"


@pytest.mark.parametrize("function", public_functions(), ids=lambda f: f.__qualname__)
def test_public_functions_document_arguments_results_and_errors(function: Function) -> None:
    assert not list(missing(function))


def test_a_missing_section_is_noticed() -> None:
    def incomplete(first: int, second: int) -> int:
        """Add.

        Args:
            first: A number.
            third: No parameter.
        """
        if second:
            raise ValueError
        return first

    expected = ["Args: second", "Args: third", "Returns", "Raises: ValueError"]
    assert list(missing(incomplete)) == expected

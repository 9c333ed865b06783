"""The English of docstrings and names, as far as a program can check it."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from language import SOURCE, breaches

UNREAD = {
    "__init__.py",
    "__main__.py",
    "aggregation",
    "api.py",
    "cli",
    "engines",
    "federation",
    "inference",
    "network",
    "testing",
}
"""Packages whose English was not gone through; the network is about to be replaced."""
PACKAGES = sorted({p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py")} - UNREAD)


def files_of(package: str) -> list[Path]:
    """Return the files of a package, or a module of its own."""
    path = SOURCE / package
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
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


@pytest.mark.parametrize("package", PACKAGES)
def test_a_method_is_documented_where_it_is_declared(package: str) -> None:
    """There it has a docstring, and nowhere below."""
    wrong = []
    for kind in classes(package):
        for name, function in vars(kind).items():
            function = inspect.unwrap(getattr(function, "fget", None) or function)
            if not inspect.isfunction(function) or name.startswith("_"):
                continue
            if function.__name__ == "<lambda>":  # the default of a field
                continue
            above = [vars(base)[name] for base in kind.__mro__[1:] if name in vars(base)]
            ours = [f for f in above if getattr(f, "__module__", "").startswith("coterie")]
            if bool(function.__doc__) == bool([f for f in ours if f.__doc__]) and not (
                above and not ours and not function.__doc__
            ):
                how = "repeats the docstring of a base class" if function.__doc__ else "has none"
                wrong.append(f"{kind.__module__}.{kind.__qualname__}.{name} {how}")
    assert not wrong, "\n".join(wrong)

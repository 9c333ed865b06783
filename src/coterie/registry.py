"""Objects by name: built in, from installed packages, and registered while a process runs."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from coterie.errors import CoterieError

T = TypeVar("T")


@dataclass
class Registry(Generic[T]):
    """Objects that run files name. An object is imported when it is asked for, not before."""

    noun: str
    """What the objects are, for error messages."""
    builtin: Mapping[str, Callable[[], T]]
    """A function that returns the object, by name, in the order in which tables show them."""
    group: str
    """The group of entry points with which installed packages add objects."""
    accept: Callable[[Any], T]
    """Checks and registers the object of an entry point; raises CoterieError to refuse it."""
    reserved: tuple[str, ...] = ()
    """Names that run files give a meaning of their own, so that no object can have them."""
    advice: str = ""
    """Last sentence of the error for an unknown name."""
    registered: dict[str, T] = field(default_factory=dict)

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Return every name, in the order in which tables show them."""
        return list(dict.fromkeys([*self.builtin, *self.entries, *self.registered]))

    def is_installed(self, name: str) -> bool:
        """Return whether every process on this machine finds the name without registering it."""
        return name in self.builtin or name in self.entries

    def check(self, name: str) -> None:
        """Raise CoterieError if no object has this name."""
        if name not in self.builtin and name not in self.names():  # entry points are slow to read
            hint = nearest(name, [*self.names(), *self.reserved])
            raise CoterieError(f"There is no {self.noun} {name!r}.{hint} {self.advice}".rstrip())

    def get(self, name: str) -> T:
        """Return the object of this name; raise CoterieError if there is none."""
        self.check(name)
        if name in self.builtin:
            return self.builtin[name]()
        return self.registered[name] if name in self.registered else self._load(self.entries[name])

    def add(self, name: str, value: T) -> None:
        """Register an object; raise CoterieError if its name is taken.

        A class may replace an earlier version of itself, from a file or a cell that was changed.
        """
        earlier = self.registered.get(name)
        taken = name in self.builtin or name in self.reserved
        if taken or (earlier is not None and _home(earlier) != _home(value)):
            raise CoterieError(f"A {self.noun} named {name!r} already exists; choose another name.")
        self.registered[name] = value

    def _load(self, entry: EntryPoint) -> T:
        try:
            return self.accept(entry.load())
        except Exception as error:
            raise CoterieError(
                f"The {self.noun} {entry.name!r} of an installed package ({entry.value}) cannot be "
                f"imported: {error}"
            ) from error


def check_named(kind: type[Any], noun: str, key: str, what: str) -> None:
    """Raise CoterieError if a class lacks a proper name, or its class variable `key`.

    Args:
        kind: The class, which is about to be registered.
        noun: What it is, for the error.
        key: A class variable that it needs beside `name`.
        what: What the variable is for.
    """
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise CoterieError(
            f"The {noun} {kind.__name__} needs a `name` of lower-case letters, digits, dots, "
            "dashes and underscores."
        )
    if not hasattr(kind, key):
        raise CoterieError(f"The {noun} {name!r} needs a `{key}`{what}.")


def _home(value: Any) -> tuple[str, str]:
    """Return the file that defines a class, or else its module, and the class's name there."""
    module = sys.modules.get(value.__module__)
    return getattr(module, "__file__", value.__module__), value.__qualname__


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question after the names that may have been meant; empty without such names."""
    from rapidfuzz.fuzz import ratio
    from rapidfuzz.process import extractOne

    known = list(known)
    longer = [each for each in known if name and each.startswith(name)]
    if len(longer) > 1:
        return f" Did you mean one of {', '.join(longer)}?"
    near = extractOne(name, known, scorer=ratio, score_cutoff=65)
    return f" Did you mean {near[0]!r}?" if near else ""

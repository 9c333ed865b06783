"""Registries of named objects: built-in, from installed packages, or registered at run time."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, model_validator

from coterie.errors import CoterieError

T = TypeVar("T")
K = TypeVar("K", bound=type[Any])


@dataclass
class Registry(Generic[T]):
    """Objects that run files refer to by name. An object is imported on first use."""

    noun: str
    """The kind of object, such as `method`, for error messages."""
    builtin: Mapping[str, Callable[[], T]]
    """A mapping from names to functions that return the built-in objects.

    Tables list the names in the order of this mapping.
    """
    group: str
    """The entry point group in which installed packages declare additional objects."""
    base: str
    """The base class (MODULE:CLASS) of all objects. The package `coterie` exports the class."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """A mapping from each class variable that an object needs besides `name`, to its purpose.

    The purpose is the end of the error message for a missing class variable.
    """
    reserved: tuple[str, ...] = ()
    """Names that have another meaning in run files, so that no object may have them."""
    advice: str = ""
    """A sentence of the error message for an unknown name, which says where the names are listed.

    The sentence begins with a space.
    """
    registered: dict[str, T] = field(default_factory=dict)

    @cached_property
    def entries(self) -> dict[str, EntryPoint]:
        """A mapping from names to the entry points of installed packages."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def names(self) -> list[str]:
        """Return all names: built-in, then from installed packages, then registered at run time.

        Tables in reports and in the documentation list the names in this order.
        """
        return list(dict.fromkeys([*self.builtin, *self.entries, *self.registered]))

    def is_installed(self, value: Any) -> bool:
        """Return whether a class is built-in or installed.

        Every process can import such a class by its name.
        """
        name = value.name
        return (name in self.builtin or name in self.entries) and self.get(name) is value

    def check(self, name: str) -> None:
        """Raise CoterieError if no object has this name."""
        if name not in self.builtin and name not in self.names():  # entry points are slow to read
            hint = nearest(name, [*self.names(), *self.reserved])
            raise CoterieError(
                f"There is no {self.noun} {name!r}.{hint}{self.advice} "
                f"To add a {self.noun} of your own, use --plugin FILE.py or coterie.register."
            )

    def get(self, name: str) -> T:
        """Return the object with this name; raise CoterieError if there is none."""
        self.check(name)
        if name in self.builtin:
            return self.builtin[name]()
        return self.registered[name] if name in self.registered else self._load(self.entries[name])

    @property
    def exported_base(self) -> str:
        """The base class as it is imported by the authors of plugins, such as `coterie.Method`."""
        return f"coterie.{self.base.partition(':')[2]}"

    def accepts(self, kind: object) -> bool:
        """Return whether an object is a subclass of the registry's base class."""
        return isinstance(kind, type) and issubclass(kind, resolve_name(self.base))

    def register(self, kind: K) -> K:
        """Register a class under its `name`, until this process ends.

        A class may replace an earlier version of itself from the same file or notebook cell.

        Args:
            kind: A subclass of the registry's base class.

        Returns:
            The class.

        Raises:
            CoterieError: The class is not a subclass of the base class, its name is missing or
                invalid, a required class variable is missing, or another object has the name.
        """
        if not self.accepts(kind):
            raise CoterieError(
                f"{kind!r} is not a {self.noun}; it must be a subclass of {self.exported_base}."
            )
        name = getattr(kind, "name", None)
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
            raise CoterieError(
                f"The {self.noun} {kind.__name__} needs a `name` of lower-case letters, digits, "
                "dots, dashes and underscores."
            )
        for key, purpose in self.requires.items():
            if not hasattr(kind, key):
                raise CoterieError(f"The {self.noun} {name!r} needs a `{key}`{purpose}.")
        earlier = self.registered.get(name)
        is_taken = name in self.builtin or name in self.reserved
        if is_taken or (earlier is not None and _origin(earlier) != _origin(kind)):
            raise CoterieError(f"A {self.noun} named {name!r} already exists; choose another name.")
        self.registered[name] = cast(T, kind)
        return kind

    def _load(self, entry: EntryPoint) -> T:
        try:
            return self.register(entry.load())
        except Exception as error:
            raise CoterieError(
                f"The {self.noun} {entry.name!r} of an installed package ({entry.value}) cannot be "
                f"imported: {error}"
            ) from error


class Section(BaseModel):
    """A part of a run file: immutable, with known keys only, and with finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NamedSpec(Section):
    """An entry of a run file that selects a registered class by its name.

    The entry is the name alone, or a mapping with the name and settings.

    The class with this name validates the settings.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as in the run file."""
        return dict(self.model_extra or {})

    def described(self) -> dict[str, Any]:
        """Return the name and the settings as a mapping for a run file."""
        return {"name": self.name, **self.settings}


def _origin(value: Any) -> tuple[str, str]:
    """Return the file that defines a class, and the class's name.

    If the module of the class has no file, return the module's name instead of the file.
    """
    module = sys.modules.get(value.__module__)
    return getattr(module, "__file__", value.__module__), value.__qualname__


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return a "Did you mean ...?" sentence for a misspelt name, or "" if no name is similar.

    Args:
        name: The unknown name.
        candidates: All valid names.
    """
    from rapidfuzz.fuzz import ratio
    from rapidfuzz.process import extractOne

    candidates = list(candidates)
    completions = [candidate for candidate in candidates if name and candidate.startswith(name)]
    if len(completions) > 1:
        return f" Did you mean one of {', '.join(completions)}?"
    closest = extractOne(name, candidates, scorer=ratio, score_cutoff=65)
    return f" Did you mean {closest[0]!r}?" if closest else ""

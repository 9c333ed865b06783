"""Plugins (`--plugin FILE.py`): Python files with classes that registries accept, such as methods.

Loading a plugin executes it, so a plugin is loaded only when the user names its file, never
because a run folder or a server refers to it. Run folders and servers record the plugin's hash, and
a file with a different hash is refused.
"""

import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from pkgutil import resolve_name
from traceback import extract_tb
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from coterie.errors import CoterieError
from coterie.files import read_file
from coterie.methods.registry import METHODS
from coterie.registry import Registry

REGISTRIES = (
    "coterie.methods.registry:METHODS",
    "coterie.transforms.registry:TRANSFORMS",
    "coterie.evaluation.metrics:METRICS",
    "coterie.data.kind:DATA_KINDS",
    "coterie.adapters.roles:ROLES",
    "coterie.report.figures:FIGURES",
)
"""The location (MODULE:NAME) of each registry to which plugins add classes.

A registry is imported when a class is registered. Some of the modules import torch, and reports are
above this package.
"""
K = TypeVar("K", bound=type[Any])


class Plugin(NamedTuple):
    """A loaded plugin file."""

    file: str
    """The absolute path."""
    sha256: str


_loaded: dict[str, Plugin] = {}
"""The loaded plugins. Each key is the name of the module that was created from the file."""


def register(kind: K) -> K:
    """Register a class, so that it can be used by its name, such as a method in a run file.

    The registration lasts for the life of the process. The function can be used as a class
    decorator.

    Args:
        kind: A subclass of Method, Transform, Metric, DataKind, Role or ReportFigure that defines
            `name`.

    Returns:
        The class.

    Raises:
        CoterieError: The class has none of these base classes, or its name is already registered.
    """
    registry = _registry(kind)
    if registry is None:
        bases = ", ".join(registry.exported_base for registry in registries())
        raise CoterieError(f"{kind!r} cannot be registered; it must be a subclass of {bases}.")
    return registry.register(kind)


def registries() -> list[Registry[Any]]:
    """Import and return all registries to which plugins add classes."""
    return [resolve_name(location) for location in REGISTRIES]


def load_plugin(file: str | Path, *, expected: str | None = None) -> list[type[Any]]:
    """Execute a Python file, and register the classes in it, such as methods and metrics.

    Args:
        file: The path of the plugin file.
        expected: The hash (SHA-256) that the file must have. A file with a different hash is not
            executed. None: any hash.

    Returns:
        The classes that were registered.

    Raises:
        CoterieError: The file cannot be read or executed, its hash does not match, or it defines
            no class that can be registered.
    """
    path = Path(file).resolve()
    try:
        code = read_file(path)
    except OSError as error:
        raise CoterieError(f"The plugin {file} cannot be read: {error.strerror}.") from None
    digest = sha256(code).hexdigest()
    if expected not in (None, digest):
        raise CoterieError(f"The plugin {file} has changed since the run began.")
    name = f"coterie_plugin_{digest[:16]}"
    if name not in _loaded:
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(path)
        try:
            _execute(code, module, file)
        except CoterieError:
            del sys.modules[name]
            raise
        _loaded[name] = Plugin(str(path), digest)
    defined = _defined(sys.modules[name])
    if not defined:
        nouns = " or ".join(registry.noun for registry in registries())
        bases = " or ".join(registry.exported_base for registry in registries())
        raise CoterieError(
            f"The plugin {file} defines no {nouns}, that is, no subclass of {bases} with a `name`."
        )
    return [registry.register(kind) for kind, registry in defined]


def _execute(code: bytes, module: ModuleType, file: str | Path) -> None:
    """Execute the code of a plugin file.

    `code` is the content whose hash was checked. The file is not read again, because it may have
    changed since then.
    """
    try:
        exec(compile(code, str(module.__file__), "exec"), vars(module))
    except SyntaxError as error:
        raise CoterieError(
            f"The plugin {file} is not valid Python (line {error.lineno}: {error.msg})."
        ) from error
    except Exception as error:
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == module.__file__]
        line = f", line {lines[-1]}" if lines else ""
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CoterieError(f"The plugin {file} cannot be loaded{line}: {reason}.") from error


def _defined(module: ModuleType) -> list[tuple[type, Registry[Any]]]:
    """Return each class that a module defines, and the registry that accepts this class.

    Classes without a `name`, classes that the module only imports, and classes that no registry
    accepts are left out.
    """
    objects = vars(module).values()
    defined = [v for v in objects if getattr(v, "__module__", "") == module.__name__]
    named = [kind for kind in defined if isinstance(kind, type) and "name" in vars(kind)]
    return [(kind, registry) for kind in named if (registry := _registry(kind)) is not None]


def _registry(kind: object) -> Registry[Any] | None:
    """Return the registry that accepts a class, or None if there is none."""
    return next((registry for registry in registries() if registry.accepts(kind)), None)


def plugin_of(kind: type) -> Plugin | None:
    """Return the plugin that defines a class, or None if the class is not from a plugin."""
    return _loaded.get(kind.__module__)


def plugins_of(kinds: Iterable[type[Any]]) -> dict[str, Plugin]:
    """Return the plugins that define the given classes; ignore classes that no plugin defines.

    The keys of the result are the same as in the section `plugins` of run.json. The key of a method
    is the method's name. The key of any other object consists of the object's type and name, as in
    `metric distinct-2`.
    """
    used: dict[str, Plugin] = {}
    for kind in kinds:
        plugin = plugin_of(kind)
        if plugin is not None and (registry := _registry(kind)) is not None:
            used[kind.name if registry is METHODS else f"{registry.noun} {kind.name}"] = plugin
    return used


def plugin_for(key: str) -> Plugin | None:
    """Return the loaded plugin that defines an object, or None if there is no such plugin.

    Args:
        key: The object's key in the mapping that `plugins_of` returns.
    """
    noun, _, name = key.rpartition(" ")
    registry = next((r for r in registries() if r.noun == noun), METHODS)
    return plugin_of(registry.get(name)) if name in registry.names() else None


def check_plugins(where: str, recorded: Mapping[str, Mapping[str, str]]) -> None:
    """Raise CoterieError if a plugin of a run is not loaded, or has changed since the run began.

    Args:
        where: The beginning of the error message, such as "The run in FOLDER".
        recorded: The file and the hash that each plugin had when the run began. The keys are the
            same as in the result of `plugins_of`.
    """
    for key, plugin in recorded.items():
        loaded, file = plugin_for(key), plugin["file"]
        noun, _, name = key.rpartition(" ")
        described = f"{noun or METHODS.noun} {name!r}"
        if loaded is None:
            raise CoterieError(
                f"{where} needs the {described} from the plugin {file}, which run.json names but "
                "which is not loaded. A plugin is executed with your permissions; if you trust "
                "this file, pass it with --plugin."
            )
        if loaded.sha256 != plugin["sha256"]:
            raise CoterieError(
                f"{where} began with the {described} from the plugin {file}, but the plugin that "
                f"is loaded now ({loaded.file}) has different content; undo the changes, or start "
                "a new run."
            )


def check_importable(where: str, kinds: Iterable[type[Any]]) -> None:
    """Raise CoterieError unless other processes can import all the classes.

    Args:
        where: The beginning of the error message, such as "The engine ray".
        kinds: The classes of the objects that a run uses.
    """
    for kind in kinds:
        registry = _registry(kind)
        assert registry is not None, f"{kind} cannot be registered"
        if plugin_of(kind) is None and not registry.is_installed(kind):
            raise CoterieError(
                f"{where} runs clients in other processes, which cannot import the "
                f"{registry.noun} {kind.name!r}; define it in a plugin file and pass the file "
                "with --plugin, or use the engine `local`."
            )


def version_of(kind: type) -> str:
    """Return a hash of the source code of a class that is not part of Coterie.

    The result is empty for Coterie's own classes and for classes whose source code is not
    available.
    """
    if kind.__module__.startswith("coterie."):
        return ""
    if (plugin := plugin_of(kind)) is not None:
        return plugin.sha256
    try:
        return sha256(getsource(kind).encode()).hexdigest()
    except (OSError, TypeError):  # defined at a prompt
        return ""

"""Methods, metrics and other objects in a file of one's own: `--plugin FILE.py`.

The file is code, so it is run only where somebody names it: never because a run's folder or a
server speaks of it. What those say is its hash, which must be the same.
"""

import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from coterie.aggregation.registry import TRANSFORMS
from coterie.data.kind import DATA_KINDS
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS
from coterie.methods.registry import METHODS
from coterie.registry import Registry

KINDS: Mapping[str, Registry[Any]] = {
    "coterie.methods.contract:Method": METHODS,
    "coterie.aggregation.transform:Transform": TRANSFORMS,
    "coterie.evaluation.metrics:Metric": METRICS,
    "coterie.data.kind:DataKind": DATA_KINDS,
}
"""What a plugin may define: the base class (module and name) and the registry of each kind.

Each subclass of a base class that has a `name` of its own is given to the registry's `accept`.
"""


K = TypeVar("K", bound=type[Any])


class Plugin(NamedTuple):
    """A file that was loaded."""

    file: str
    """Its absolute path."""
    sha256: str


_loaded: dict[str, Plugin] = {}
"""By the name of the module that a file has become."""


def register(kind: K) -> K:
    """Give a method's or a metric's class its name in run files, while this process runs.

    It may stand above the class as a decorator.

    Raises:
        CoterieError: The class is of no kind that can be registered, or its name is taken.
    """
    registry = _registry(kind) if isinstance(kind, type) else None
    if registry is None:
        bases = ", ".join(f"coterie.{base.partition(':')[2]}" for base in KINDS)
        raise CoterieError(f"{kind!r} cannot be registered; it must be a subclass of {bases}.")
    return registry.accept(kind)


def load_plugin(file: str | Path, *, expected: str | None = None) -> list[type[Any]]:
    """Run a Python file and register the methods, metrics, ... that it defines.

    Args:
        file: The file.
        expected: The hash that the file must have; with another one, it is not run.

    Returns:
        The classes that were registered.

    Raises:
        CoterieError: The file cannot be read or run, or defines nothing that can be registered.
    """
    path = Path(file).resolve()
    try:
        code = path.read_bytes()
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
            _run(code, module, file)
        except CoterieError:
            del sys.modules[name]
            raise
        _loaded[name] = Plugin(str(path), digest)
    defined = _defined(sys.modules[name])
    if not defined:
        nouns = " or ".join(registry.noun for registry in KINDS.values())
        bases = " or ".join(f"coterie.{base.partition(':')[2]}" for base in KINDS)
        raise CoterieError(
            f"The plugin {file} defines no {nouns}, that is, no subclass of {bases} with a `name`."
        )
    return [registry.accept(kind) for kind, registry in defined]


def _run(code: bytes, module: ModuleType, file: str | Path) -> None:
    """Run the very bytes that were hashed."""
    try:
        exec(compile(code, str(module.__file__), "exec"), vars(module))
    except SyntaxError as error:
        raise CoterieError(
            f"The plugin {file} is not valid Python, line {error.lineno}: {error.msg}."
        ) from error
    except Exception as error:
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == module.__file__]
        where = f", line {lines[-1]}" if lines else ""
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CoterieError(f"The plugin {file} cannot be loaded{where}: {what}.") from error


def _defined(module: ModuleType) -> list[tuple[type, Registry[Any]]]:
    """Return the classes with a `name` that a module defines itself, and their registries."""
    here = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    named = [kind for kind in here if isinstance(kind, type) and "name" in vars(kind)]
    return [(kind, found) for kind in named if (found := _registry(kind)) is not None]


def _registry(kind: type) -> Registry[Any] | None:
    """Return the registry for a class; None if the class is of no kind in `KINDS`."""
    for base, registry in KINDS.items():
        module, _, name = base.partition(":")
        # The module of a base class that has a subclass is imported already; it may need torch.
        if module in sys.modules and issubclass(kind, getattr(sys.modules[module], name)):
            return registry
    return None


def plugin_of(kind: type) -> Plugin | None:
    """Return the plugin that defines a class, if one does."""
    return _loaded.get(kind.__module__)


def plugins_of(kinds: Iterable[type[Any]]) -> dict[str, Plugin]:
    """Return the plugins that define some of the classes.

    Keys are as run.json has them: a method's name, and the noun and the name of anything else
    (`metric distinct-2`).
    """
    found: dict[str, Plugin] = {}
    for kind in kinds:
        registry, plugin = _registry(kind), plugin_of(kind)
        if registry is not None and plugin is not None:
            found[kind.name if registry is METHODS else f"{registry.noun} {kind.name}"] = plugin
    return found


def plugin_for(key: str) -> Plugin | None:
    """Return the plugin that defines what a key of `plugins_of` names; None if none does here."""
    noun, _, name = key.rpartition(" ")
    registry = next((r for r in KINDS.values() if r.noun == noun), METHODS)
    return plugin_of(registry.get(name)) if name in registry.names() else None


def check_plugins(where: str, recorded: Mapping[str, Mapping[str, str]]) -> None:
    """Raise CoterieError unless the plugins that a run began with are loaded, and unchanged.

    Args:
        where: What begins the error: "The run in ...".
        recorded: File and hash by key; see `plugins_of`.
    """
    for key, began in recorded.items():
        here, file = plugin_for(key), began["file"]
        noun, _, name = key.rpartition(" ")
        what = f"{noun or METHODS.noun} {name!r}"
        if here is None:
            raise CoterieError(
                f"{where} uses the {what} from a plugin, which its folder says was {file}; a "
                "plugin runs as your own code, so give --plugin with a file that you trust"
            )
        if here.sha256 != began["sha256"]:
            raise CoterieError(
                f"{where} uses the {what} from the plugin {file}, which has changed since the run "
                f"began (now {here.file}); undo the changes, or start a new run."
            )


def version_of(kind: type) -> str:
    """Return a hash of the code of a class from outside the package; empty without its source."""
    if kind.__module__.startswith("coterie."):
        return ""
    if (plugin := plugin_of(kind)) is not None:
        return plugin.sha256
    try:
        return sha256(getsource(kind).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return ""

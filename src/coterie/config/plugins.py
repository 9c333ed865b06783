"""Methods in a file of one's own: `--plugin FILE.py`.

The file is code, so it is run only where somebody names it: never because a run's folder or a
server speaks of it. What those say is its hash, which must be the same.
"""

import sys
from collections.abc import Mapping
from hashlib import sha256
from inspect import getsource
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from coterie.errors import CoterieError
from coterie.methods.registry import kind_of, names, register

if TYPE_CHECKING:
    from coterie.methods.contract import Method


class Plugin(NamedTuple):
    """A file that was loaded."""

    file: str
    """Its absolute path."""
    sha256: str


_loaded: dict[str, Plugin] = {}
"""By the name of the module that a file has become."""


def load_plugin(file: str | Path, *, expected: str | None = None) -> "list[type[Method]]":
    """Run a Python file and register the methods that it defines; returns their classes.

    Where another hash than the file's is `expected`, it is not run. Raises CoterieError if it
    cannot be read or run, or if it defines no method.
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
    found = _methods(sys.modules[name])
    if not found:
        raise CoterieError(
            f"The plugin {file} defines no method, that is, no subclass of coterie.Method "
            "with a `name`."
        )
    return [register(kind) for kind in found]


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


def _methods(module: ModuleType) -> "list[type[Method]]":
    """The classes with a name of their own that a module defines, and not those it imports."""
    from coterie.methods.contract import Method

    here = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    return [k for k in here if isinstance(k, type) and issubclass(k, Method) and "name" in vars(k)]


def plugin_of(kind: "type[Method]") -> Plugin | None:
    """The plugin that a method is from."""
    return _loaded.get(kind.__module__)


def check_plugins(where: str, recorded: Mapping[str, Mapping[str, str]]) -> None:
    """Raise CoterieError unless the plugins that a run began with are loaded, and unchanged."""
    for name, began in recorded.items():
        here = plugin_of(kind_of(name)) if name in names() else None
        file = began["file"]
        if here is None:
            raise CoterieError(
                f"{where} uses the method {name!r} from a plugin, which its folder says was "
                f"{file}; a plugin runs as your own code, so give --plugin with a file that you "
                "trust"
            )
        if here.sha256 != began["sha256"]:
            raise CoterieError(
                f"{where} uses the method {name!r} from the plugin {file}, which has changed since "
                f"the run began (now {here.file}); undo the changes, or start a new run."
            )


def version_of(kind: "type[Method]") -> str:
    """Which code a method is from outside the package: a hash; empty where nothing can tell."""
    if kind.__module__.startswith("coterie."):
        return ""
    if (plugin := plugin_of(kind)) is not None:
        return plugin.sha256
    try:
        return sha256(getsource(kind).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt
        return ""

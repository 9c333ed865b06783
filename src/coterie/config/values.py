"""The plain data of YAML files, and changes to them with `--set key=value`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from coterie.errors import CoterieError
from coterie.files import expanded, path_part

DEMO = Path(__file__).parents[1] / "assets" / "demo.yaml"
"""The run file of the embedded demo."""


def read_values(path: Path | None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read the plain data of a run file without validating it.

    Args:
        path: The run file, or None for the embedded demo.
        settings: Changes to the file, such as `training.batch=4`.

    Raises:
        CoterieError: The file does not contain a mapping, or a setting cannot be applied.
    """
    path = located(path or DEMO)
    values = read_mapping(path)
    values.setdefault("name", path_part(path.stem) or "run")
    place_data(values, path)
    for setting in settings:
        apply_setting(values, setting)
    return values


def place_data(values: dict[str, Any], path: Path) -> None:
    """Prefix a relative `data_root` with the folder of the run file.

    Without the prefix, `data_root` would be resolved against the working directory.

    Args:
        values: The plain data of the run file, which are changed in place. If `data_root` is
            absent, it is set to the folder of the run file. An absolute path is not changed.
        path: The run file.
    """
    if isinstance(root := values.get("data_root") or "", str):  # else validation rejects it
        values["data_root"] = str(path.parent / expanded(root))


def located(path: Path) -> Path:
    """Replace the name of an embedded run file with the path of that file.

    If no file exists at `path`, and `path` is the name of an embedded run file, such as `demo`, the
    path of the embedded file is returned. Otherwise, `path` is returned unchanged.
    """
    if path.exists() or path.name != str(path):
        return path
    shipped = DEMO.with_name(f"{path}.yaml")
    return shipped if shipped.is_file() else path


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file that contains a mapping.

    Raises:
        CoterieError: The file cannot be read, or does not contain a mapping.
    """
    problem = "is not a mapping of keys to values"
    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        if values is None:
            problem = (
                "is empty; it needs at least `clients` or `divide` (to run the demo, use "
                "`coterie run` without a run file)"
            )
    except FileNotFoundError:
        raise CoterieError(f"There is no run file {path}.") from None
    except IsADirectoryError:
        raise CoterieError(
            f"{path} is a folder, not a run file; write one with `coterie init {path}`."
        ) from None
    except OSError as error:
        problem = f"could not be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except yaml.YAMLError as error:
        problem = f"is not valid YAML{_mark(error)}"
    raise CoterieError(f"The run file {path} {problem}.")


class _Loader(yaml.SafeLoader):
    """A safe loader that rejects duplicate keys; PyYAML would silently use the last duplicate."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Parse an integer; raise ValueError if it has more digits than Python can print."""
    value = loader.construct_yaml_int(node)
    str(value)
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def read_yaml(text: str) -> Any:
    """Parse YAML; raise yaml.YAMLError for every error, even if PyYAML raises another exception."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise yaml.YAMLError(str(error)) from error


def _mark(error: yaml.YAMLError) -> str:
    """Format the position and the cause of a YAML error.

    The result is an empty string if the parser reports no position.
    """
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    return f", line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def apply_setting(values: dict[str, Any], setting: str) -> None:
    """Apply a setting such as `training.batch=4` to a run file's data in place.

    The value is parsed as YAML.
    """
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise CoterieError(f"--set takes key=value, such as training.batch=4, not {setting!r}.")
    try:
        put(values, path, read_yaml(text))
    except yaml.YAMLError as error:
        raise CoterieError(f"--set {setting!r:.80}: the value is not valid YAML.") from error
    except CoterieError as error:
        raise CoterieError(f"--set {setting!r}: {error}") from error


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path in `values`.

    The nested mappings along the path are copied before they are changed, so that other data that
    contain these mappings stay unchanged.
    """
    *parents, last = path.split(".")
    target = values
    for parent in parents:
        inner = target.get(parent)
        if parent in ("method", "optimiser", "base") and isinstance(inner, str):
            inner = {"name": inner}  # NAME is short for {name: NAME}
        elif inner is not None and not isinstance(inner, Mapping):
            raise CoterieError(
                f"{parent!r} is not a mapping, so no key inside it can be set; set the whole value "
                f"of {parent!r} instead."
            )
        target[parent] = dict(inner or {})
        target = target[parent]
    target[last] = value

"""Reading run files: YAML and `--set key=value`, into one validated description of a run."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from coterie.config.errors import validated
from coterie.config.sections import METHOD, Sections
from coterie.data.files import find_files, resolve
from coterie.errors import CoterieError, plural
from coterie.files import expanded, path_part

if TYPE_CHECKING:
    from coterie.config.run import RunConfig

DEMO = Path(__file__).parents[1] / "assets" / "demo.yaml"
"""The run file of the embedded demo."""
DEMO_TEXT = DEMO.parent / "demo-writers" / "poet.txt"
TUNABLE = ("rounds", "method", "training", "aggregation")
"""What may be tuned: the rest is the data, and how models are scored."""
OF_SAMPLES = ("instructions", "messages", "preferences", "chat_template")
"""Keys of `data` that a text of the demo does not fit."""
NOT_TUNABLE = ("method", "method.name", "training.precision", *TUNABLE[2:])
"""Methods are compared, not tuned; and bases are loaded in one precision."""


def load_config(path: Path | None, settings: Sequence[str] = ()) -> "RunConfig":
    """Read a run file (None: the embedded demo) and apply settings such as `training.batch=4`.

    Raises CoterieError, in one sentence, for anything that is not a valid run.
    """
    return _checked(_values(path, settings))


def check_texts(
    path: Path | None,
    settings: Sequence[str] = (),
    tune: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Raise CoterieError for what is wrong in a run file outside the method, or with a value to
    tune, or for a client's file or folder that is not there."""
    values = _values(path, settings)
    check_trials(values, tune or {})
    sections = check_sections(values)
    for client in sections.clients:
        for source in (client.path, client.train, client.validation, client.test):
            if source is not None:
                find_files(resolve(Path(sections.data_root), source), f"Client {client.name}")


def load_deployment(
    path: Path | None,
    settings: Sequence[str],
    registered: Sequence[str],
    without: Collection[str] = (),
) -> "RunConfig":
    """A run file as its server reads it: clients have names, and their texts are elsewhere.

    A run file without `clients` is for all that are registered; none is for those in `without`.
    Raises CoterieError as `load_config` does.
    """
    values = _values(path, settings)
    if values.get("divide") is not None:
        raise CoterieError("In a deployment, clients have their own texts; remove `divide`.")
    if not values.get("clients"):
        if not registered:
            raise CoterieError("No client has a key yet; create one with `coterie keys add NAME`.")
        values["clients"] = [{"name": name} for name in registered]
        apply_setting(values, "deployment.anyone=true")
    config = _checked({**_with_text(values, "-"), "baselines": []})
    names = {client.name for client in config.clients}
    if (unknown := set(without) - names) and not config.deployment.anyone:
        raise CoterieError(
            f"The run has no client {min(unknown)!r} (clients: {', '.join(sorted(names))})."
        )
    clients = tuple(client for client in config.clients if client.name not in without)
    if not clients:
        raise CoterieError("The run has no client left.")
    config = config.model_copy(update={"clients": clients})
    if (dpo := config.training.dpo) is not None and dpo.reference != "base":
        raise CoterieError(
            "training.dpo.reference names a run, which clients of a deployment do not have; set it "
            "to base."
        )
    if config.pooled:
        raise CoterieError(
            "A pooled run trains on all clients' text in one place; it cannot be deployed."
        )
    return config


def check_start(config: "RunConfig", registered: Collection[str]) -> None:
    """Raise CoterieError if a new run cannot meet its quorum, or a client of it has no key."""
    quorum, count = config.deployment.quorum, len(config.clients)
    if quorum is not None and quorum > count and not config.deployment.anyone:
        raise CoterieError(
            f"deployment.quorum is {quorum}, but the run has only {plural(count, 'client')}."
        )
    for client in config.clients:
        if client.name not in registered:
            raise CoterieError(
                f"The client {client.name!r} has no key; create one with `coterie keys add "
                f"{client.name}`, or leave it out with --without {client.name}."
            )


def load_agreed(path: Path, client: str) -> "RunConfig":
    """A run file as a client of it reads it, whose server reads the same."""
    return load_deployment(path, (), [client])


def load_with_any_text(path: Path | None, settings: Sequence[str] = ()) -> "RunConfig":
    """A run file, with a text of the demo for clients that give none: those of a deployment."""
    values = _values(path, settings)
    filled = _with_text(values, str(DEMO_TEXT))
    if filled != values and isinstance(filled.get("data"), dict):
        filled["data"] = {k: v for k, v in filled["data"].items() if k not in OF_SAMPLES}
        if isinstance(filled.get("training"), dict):
            filled["training"] = {k: v for k, v in filled["training"].items() if k != "dpo"}
    return _checked(filled)


def _checked(values: Mapping[str, Any]) -> "RunConfig":
    """What `parse` makes of it; torch, which takes seconds to import, waits for the sections."""
    check_sections(values)
    from coterie.config.run import parse

    return parse(values)


def check_sections(values: Mapping[str, Any]) -> Sections:
    """All but the method; raises CoterieError with the first thing that is wrong there."""
    return validated(Sections, values, METHOD)


def _with_text(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The run with a path for clients that have none; what is not a list, the parser refuses."""
    listed = values.get("clients")
    if not isinstance(listed, list):
        return values
    lack = [isinstance(c, dict) and not {"path", "train"} & c.keys() for c in listed]
    clients = [{**c, "path": path} if no else c for c, no in zip(listed, lack, strict=True)]
    return {**values, "clients": clients}


def _values(path: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    path = located(path or DEMO)
    values = read_mapping(path)
    values.setdefault("name", path_part(path.stem) or "run")
    place_data(values, path)
    for setting in settings:
        apply_setting(values, setting)
    return values


def place_data(values: dict[str, Any], path: Path) -> None:
    """Make `data_root` relative to the file at a path, whatever the folder one is in."""
    if isinstance(root := values.get("data_root") or "", str):  # else it is refused later
        values["data_root"] = str(path.parent / expanded(root))


def located(path: Path) -> Path:
    """The file itself; where there is none, the embedded run file of that name."""
    if path.exists() or path.name != str(path):
        return path
    shipped = DEMO.with_name(f"{path}.yaml")
    return shipped if shipped.is_file() else path


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; raises CoterieError, in one sentence, if it does not."""
    problem = "is not a mapping of keys to values"
    try:
        values = _read(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
        if values is None:
            problem = (
                "is empty; it needs at least `clients` or `divide` (`coterie run` runs a demo)"
            )
    except FileNotFoundError:
        raise CoterieError(f"There is no run file {path}.") from None
    except OSError as error:
        problem = f"could not be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not UTF-8 text"
    except yaml.YAMLError as error:
        problem = f"is not valid YAML{_mark(error)}"
    raise CoterieError(f"The run file {path} {problem}.")


class _Once(yaml.SafeLoader):
    """Plain YAML, in which a key that stands twice is an error: the second would count silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _whole_number(loader: _Once, node: yaml.ScalarNode) -> int:
    """A number that can be shown; raises ValueError for one of too many digits."""
    value = loader.construct_yaml_int(node)
    str(value)
    return value


_Once.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _read(text: str) -> Any:
    """A value; raises yaml.YAMLError alone, where PyYAML has others for values unlike their tag."""
    try:
        return yaml.load(text, _Once)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise yaml.YAMLError(str(error)) from error


def _mark(error: yaml.YAMLError) -> str:
    """Where a file stops being YAML, and why, as far as the parser says."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return ""
    mark = error.problem_mark
    return f", line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def apply_setting(values: dict[str, Any], setting: str) -> None:
    """Apply one `key.inner=value`; the value is read as YAML."""
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise CoterieError(f"--set takes key=value, such as training.batch=4, not {setting!r}.")
    try:
        value = _read(text)
    except yaml.YAMLError as error:
        raise CoterieError(f"--set {setting!r:.80}: the value is not valid YAML.") from error
    try:
        put(values, path, value)
    except CoterieError as error:
        raise CoterieError(f"--set {setting!r}: {error}") from error


def put(values: dict[str, Any], path: str, value: Any) -> None:
    """Give the key at a dotted path a value; mappings on the way are copied, not changed."""
    *parents, last = path.split(".")
    target = values
    for parent in parents:
        inner = target.get(parent)
        if parent in ("method", "optimiser", "base") and isinstance(inner, str):
            inner = {"name": inner}  # what is given by its name alone has settings too
        elif inner is not None and not isinstance(inner, Mapping):
            raise CoterieError(f"{parent!r} is not a mapping; set it as a whole.")
        target[parent] = dict(inner or {})
        target = target[parent]
    target[last] = value


def read_tune(options: Sequence[str]) -> dict[str, list[Any]]:
    """Values by key, of options such as `training.batch=4,8`; the values are read as YAML."""
    tune: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        try:
            values = _read(f"[{text}]")
        except yaml.YAMLError:
            values = None
        if not (key and equals and values):
            raise CoterieError(
                "--tune takes a key and its values, such as training.learning_rate=1e-4,1e-3, not "
                f"{option!r}."
            )
        if key in tune:
            raise CoterieError(f"--tune has {key} twice; list all values in one --tune.")
        tune[key] = values
    return tune


def check_tune(tune: Mapping[str, Sequence[Any]], split: str) -> None:
    """Raise CoterieError for a key that may not be tuned, or for a run that is not scored on test
    text."""
    for key, values in tune.items():
        if not values:
            raise CoterieError(f"There are no values of {key} to tune with.")
        if key.partition(".")[0] not in TUNABLE or key in NOT_TUNABLE:
            raise CoterieError(
                f"{key} cannot be tuned; choose from the settings of {', '.join(TUNABLE)}."
            )
    if tune and split != "test":
        raise CoterieError(
            "Tuning uses the validation text, so models must be scored on the test text; remove "
            "evaluation.split."
        )


def check_trials(values: dict[str, Any], tune: Mapping[str, Sequence[Any]]) -> None:
    """Raise CoterieError for what is wrong outside the method, in a run or with a value to tune."""
    check_tune(tune, check_sections(values).evaluation.split)
    for key, value in ((key, value) for key, found in tune.items() for value in found):
        trial = dict(values)
        put(trial, key, value)
        check_sections(trial)

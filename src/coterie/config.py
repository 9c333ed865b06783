"""One validated description of a run, from a YAML file and `--set key=value`."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)
from rapidfuzz.process import extractOne

from coterie.data import ClientSpec, DataSpec, DivideSpec
from coterie.errors import CoterieError
from coterie.methods import POOLED, Method, available, method_from
from coterie.training.spec import TrainingSpec

DEMO = Path(__file__).parent / "assets" / "demo.yaml"
"""The run file of the embedded demo."""


class EvaluationSpec(BaseModel):
    """Section `evaluation` of a run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: int | None = Field(None, ge=1, description="rounds between evaluations; the last always")
    batch: int = Field(16, ge=1, description="windows at once; does not change the result")


class RunConfig(BaseModel):
    """A run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="of the run")
    seed: int = Field(0, ge=0, description="every random draw comes from it")
    threads: int | None = Field(None, ge=1, description="processor threads; default: all")
    base: str = Field("tiny-gpt2", description="an embedded base, a folder, or a name on the hub")
    method: SerializeAsAny[Method] = Field(description="a name, or a mapping with name and more")
    pooled: bool = Field(False, description="one client that holds everybody's text")
    baselines: tuple[str, ...] = Field((), description="methods to run first, on the same data")
    rounds: int = Field(20, ge=1, description="communication rounds")
    data_root: str = Field(
        "", description="where relative paths start; default: this file's folder"
    )
    data: DataSpec = DataSpec()
    clients: tuple[ClientSpec, ...] = Field((), description="who takes part, each with its text")
    divide: DivideSpec | None = Field(None, description="or: one data set, divided among clients")
    training: TrainingSpec = TrainingSpec()
    evaluation: EvaluationSpec = EvaluationSpec()

    @model_validator(mode="before")
    @classmethod
    def _centralized(cls, values: Any) -> Any:
        """The name `centralized` stands for local training on one pooled client."""
        if isinstance(values, Mapping):
            method = values.get("method", "comigs-1g1s")
            named = method if isinstance(method, Mapping) else {"name": method}
            if named.get("name") == POOLED:
                return {**values, "method": {**named, "name": "local"}, "pooled": True}
            return {**values, "method": method}
        return values

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Method:
        return method_from(value)

    @field_serializer("method")
    def _described(self, method: Method) -> dict[str, Any]:
        return method.described()

    @model_validator(mode="after")
    def _who(self) -> "RunConfig":
        if bool(self.clients) == (self.divide is not None):
            raise ValueError("give either `clients` or `divide`")
        names = [client.name for client in self.clients]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the client {name!r} is named twice in `clients`")
        return self

    @property
    def label(self) -> str:
        """The method's name for tables."""
        return POOLED if self.pooled else self.method.name

    @property
    def root(self) -> Path:
        """Where relative paths start."""
        return Path(self.data_root)

    def with_method(self, name: str) -> "RunConfig":
        """The same run with another method, by name, and without baselines.

        Settings that make methods comparable (`Method.common`) are carried over where they were
        changed, if the other method has them.
        """
        kind = available().get("local" if name == POOLED else name, Method)
        carried = {
            field: value
            for field in self.method.common
            if field in kind.model_fields
            and (value := getattr(self.method, field))
            != type(self.method).model_fields[field].default
        }
        method = {"name": name, **carried}
        return parse({**self.as_dict(), "method": method, "pooled": False, "baselines": []})

    def as_dict(self) -> dict[str, Any]:
        """As plain data, every default filled in."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """A hash of everything that can change the result, data files' contents apart."""
        what = {k: v for k, v in self.as_dict().items() if k not in ("name", "baselines")}
        canonical = json.dumps(what, sort_keys=True)
        return blake2b(canonical.encode(), digest_size=8).hexdigest()


def load_config(path: Path | None, settings: Sequence[str] = ()) -> RunConfig:
    """Read a run file (None: the embedded demo) and apply settings such as `training.batch=4`.

    Raises CoterieError, in one sentence, for anything that is not a valid run.
    """
    path = path or DEMO
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CoterieError(f"There is no run file {path}.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CoterieError(f"The run file {path} could not be read: {_one_line(error)}.") from error
    if not isinstance(values, dict):
        raise CoterieError(f"The run file {path} is not a mapping of keys to values.")
    values.setdefault("name", path.stem)
    values["data_root"] = str((path.parent / str(values.get("data_root", ""))).resolve())
    for setting in settings:
        _set(values, setting)
    return parse(values)


def parse(values: Mapping[str, Any]) -> RunConfig:
    """A run from plain data; raises CoterieError with the first thing that is wrong."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise CoterieError(_sentence(error)) from error


def _set(values: dict[str, Any], setting: str) -> None:
    """Apply one `key.inner=value`; the value is read as YAML."""
    path, equals, text = setting.partition("=")
    if not equals or not path:
        raise CoterieError(f"--set takes key=value, such as training.batch=4, not {setting!r}.")
    *parents, last = path.split(".")
    target = values
    for parent in parents:
        inner = target.get(parent)
        # A method or client given by its name alone becomes a mapping when one of its keys is set.
        target[parent] = dict(inner) if isinstance(inner, Mapping) else {}
        if parent == "method" and isinstance(inner, str):
            target[parent] = {"name": inner}
        target = target[parent]
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CoterieError(f"--set {setting!r}: the value is not YAML.") from error
    if path == "data_root":
        target[last] = str(Path(text).resolve())


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _keys_beside(error.title, first["loc"])
        near = extractOne(str(first["loc"][-1]), known, score_cutoff=60)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known keys: {', '.join(known)}."
        return f"Unknown key {where!r}.{hint}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}." if where else f"{message[0].upper()}{message[1:]}."


def _keys_beside(title: str, location: tuple[int | str, ...]) -> list[str]:
    """The keys that a mapping of the run file may have, by the place of a wrong one."""
    models: list[type[BaseModel]] = [RunConfig, *available().values()]
    model = next((m for m in models if m.__name__ == title), RunConfig)
    for part in location[:-1]:
        if not isinstance(part, str) or part not in model.model_fields:
            continue
        model = next(
            (m for m in _models_in(model.model_fields[part].annotation) if m is not Method), model
        )
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    inner = getattr(annotation, "__args__", ())
    return [model for part in inner for model in _models_in(part)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

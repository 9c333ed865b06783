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

from coterie.aggregation import AggregationSpec
from coterie.config_errors import refuse_renamed, sentence
from coterie.data import ClientSpec, DataSpec, DivideSpec
from coterie.data.templates import inlined
from coterie.errors import CoterieError
from coterie.files import path_part
from coterie.methods import POOLED, Method, available, carried, method_from
from coterie.methods.contract import SERVER
from coterie.training.spec import EvaluationSpec, TrainingSpec

DEMO = Path(__file__).parent / "assets" / "demo.yaml"
"""The run file of the embedded demo."""
DEMO_TEXT = DEMO.parent / "demo-writers" / "poet.txt"
NOT_IN_DIGEST = ("name", "baselines", "deployment")
METHOD = "comigs-1g1s"
"""The method of a run file that names none."""


class DeploymentSpec(BaseModel):
    """Section `deployment` of a run file: what a server does when clients are late or gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anyone: bool = Field(
        default=False,
        description="clients that are not named may join, too, if they have a key; so if none is",
    )
    quorum: int | None = Field(
        default=None, ge=1, description="clients that a round needs; default: all that are named"
    )
    deadline: float = Field(
        default=3600, gt=0, description="seconds after which a round that has its quorum ends"
    )
    share_metrics: bool = Field(
        default=False, description="clients send losses and scores to the server; else none leave"
    )
    largest_message: int = Field(
        default=256, ge=1, description="MiB; a larger message is refused unread"
    )


class ServerSpec(BaseModel):
    """Section `server` of a run file: it gives the server a model of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str | None = Field(
        default=None,
        description="the section, also as `server: {}`, gives the server a model of its own, on"
        " this base; default: the run's",
    )
    test: str | None = Field(
        default=None,
        description="file or folder that the server's model is scored on; default: what a division"
        " with a public part sets aside",
    )


class RunConfig(BaseModel):
    """A run file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="of the run; default: the file's",
    )
    seed: int = Field(default=0, ge=0, description="every random draw comes from it")
    threads: int | None = Field(default=None, ge=1, description="processor threads; default: all")
    base: str = Field(
        default="tiny-gpt2", description="an embedded base, a folder, or a name on the hub"
    )
    bases: dict[str, str] = Field(
        default={}, description="by client: its base, where it is not the run's `base`"
    )
    server: ServerSpec | None = None
    method: SerializeAsAny[Method] = Field(
        default_factory=lambda: method_from(METHOD),
        description="a name, or a mapping of `name` and the method's settings",
    )
    pooled: bool = Field(default=False, description="one client that holds everybody's text")
    baselines: tuple[str, ...] = Field(
        default=(), description="methods to run first, on the same data (the run's own is left out)"
    )
    rounds: int = Field(default=20, ge=1, description="communication rounds")
    data_root: str = Field(
        default="",
        validate_default=True,
        description="where relative paths start; default: the run file's folder",
    )
    data: DataSpec = DataSpec()
    clients: tuple[ClientSpec, ...] = Field(
        default=(), description="who takes part, each with its text"
    )
    divide: DivideSpec | None = Field(
        default=None, description="or: one data set, divided among clients"
    )
    training: TrainingSpec = TrainingSpec()
    aggregation: AggregationSpec = AggregationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    deployment: DeploymentSpec = DeploymentSpec()

    @model_validator(mode="before")
    @classmethod
    def _centralized(cls, values: Any) -> Any:
        """The name `centralized` stands for local training on one pooled client."""
        if isinstance(values, Mapping):
            method = values.get("method")
            named = method if isinstance(method, Mapping) else {"name": method}
            if named.get("name") == POOLED:
                return {**values, "method": {**named, "name": "local"}, "pooled": True}
        return values

    @model_validator(mode="before")
    @classmethod
    def _template(cls, values: Any) -> Any:
        """A template's file is read at once: a deployed client has the run and not the file."""
        match values:
            case {"data": {"instructions": {"template": str(name)} as instructions} as data}:
                root = Path(values.get("data_root") or "").expanduser()
                instructions = {**instructions, "template": inlined(name, root)}
                return {**values, "data": {**data, "instructions": instructions}}
        return values

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Method:
        return method_from({"name": METHOD, **value} if isinstance(value, dict) else value)

    @field_validator("baselines")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            method_from("local" if name == POOLED else name)
        return names

    @field_validator("data_root")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        return str(Path(folder).expanduser().resolve())

    @field_serializer("method")
    def _described(self, method: Method) -> dict[str, Any]:
        return method.described()

    @model_validator(mode="after")
    def _who(self) -> "RunConfig":
        if not self.clients and self.divide is None:
            raise ValueError("nobody takes part: list `clients`, or `divide` a data set among them")
        if self.clients and self.divide is not None:
            raise ValueError("`clients` and `divide` exclude each other; give one of them")
        if self.divide is not None and self.divide.public and self.data.public is not None:
            raise ValueError("divide.public and data.public both give a public text; give one")
        names = [client.name for client in self.clients]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the client {name!r} is named twice in `clients`")
        return self

    @model_validator(mode="after")
    def _can_be_measured(self) -> "RunConfig":
        metric, generate = self.evaluation.metric, self.evaluation.generate
        if metric not in (None, "perplexity") or generate is not None:
            what = "evaluation.generate" if generate else f"evaluation.metric: {metric}"
            if self.data.instructions is None:
                raise ValueError(f"{what} is for prompts with answers; set data.instructions")
        if metric in ("exact_match", "rouge_l") and generate is None:
            raise ValueError(
                f"{metric} is of answers that models write; set evaluation.generate to how many"
                " tokens they may have"
            )
        return self

    @property
    def label(self) -> str:
        """The method's name for tables."""
        return POOLED if self.pooled else self.method.name

    @property
    def root(self) -> Path:
        """Where relative paths start."""
        return Path(self.data_root)

    def base_of(self, name: str) -> str:
        """The base of a client, or of the `server` where it has a model of its own."""
        name = self._whose(name)
        if name == SERVER and self.server is not None:
            return self.server.base or self.base
        return self.base if self.pooled else self.bases.get(name, self.base)

    def training_of(self, name: str) -> TrainingSpec:
        """The training of a client, or of the `server`, with its own learning rate."""
        return self.training.of(self._whose(name))

    def _whose(self, name: str) -> str:
        """The one client of a pooled run trains the server's model, if that has one."""
        return SERVER if self.pooled and self.server is not None else name

    def with_method(self, name: str) -> "RunConfig":
        """The same run with another method, by name, and without baselines.

        The run's own method keeps its settings. A part of them that was changed (`mlp`,
        `attention`, ...) is carried over to others that have it, so that a rank means the same.
        """
        if name == self.label:
            return self.model_copy(update={"baselines": ()})
        kind = available().get("local" if name == POOLED else name, Method)
        method = {"name": name, **carried(self.method, kind)}
        return parse({**self.as_dict(), "method": method, "pooled": False, "baselines": []})

    def as_dict(self) -> dict[str, Any]:
        """As plain data, every default filled in."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """A hash of everything that can change the result, data files' contents apart."""
        what = {k: v for k, v in self.as_dict().items() if k not in NOT_IN_DIGEST}
        canonical = json.dumps(what, sort_keys=True)
        return blake2b(canonical.encode(), digest_size=8).hexdigest()


def load_config(path: Path | None, settings: Sequence[str] = ()) -> RunConfig:
    """Read a run file (None: the embedded demo) and apply settings such as `training.batch=4`.

    Raises CoterieError, in one sentence, for anything that is not a valid run.
    """
    return parse(_values(path, settings))


def load_deployment(
    path: Path | None, settings: Sequence[str], registered: Sequence[str]
) -> RunConfig:
    """A run file as its server reads it: clients have names, and their texts are elsewhere.

    A run file without `clients` is for all that are registered. Raises CoterieError as
    `load_config` does, and for clients that are not registered.
    """
    values = _values(path, settings)
    if values.get("divide") is not None:
        raise CoterieError("In a deployment the texts are with the clients; leave `divide` out.")
    if not values.get("clients"):
        if not registered:
            raise CoterieError("No client has a key yet; make one with `coterie keys add NAME`.")
        values["clients"] = [{"name": name} for name in registered]
        apply_setting(values, "deployment.anyone=true")
    config = parse({**_with_text(values, "-"), "baselines": []})
    for client in config.clients:
        if client.name not in registered:
            raise CoterieError(
                f"The client {client.name!r} has no key; make one with `coterie keys add "
                f"{client.name}`."
            )
    if config.pooled:
        raise CoterieError("A pooled run has everybody's text in one place; it cannot be deployed.")
    quorum, count = config.deployment.quorum, len(config.clients)
    if quorum is not None and quorum > count and not config.deployment.anyone:
        raise CoterieError(f"deployment.quorum is {quorum}, but the run has {count} clients.")
    return config


def load_with_any_text(path: Path | None, settings: Sequence[str] = ()) -> RunConfig:
    """A run file, with a text of the demo for clients that give none: those of a deployment."""
    values = _values(path, settings)
    filled = _with_text(values, str(DEMO_TEXT))
    if filled != values and isinstance(filled.get("data"), dict):
        filled["data"] = {k: v for k, v in filled["data"].items() if k != "instructions"}
    return parse(filled)


def _with_text(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The run with a path for clients that have none; what is not a list, the parser refuses."""
    listed = values.get("clients")
    if not isinstance(listed, list):
        return values
    lack = [isinstance(c, dict) and not {"path", "train"} & c.keys() for c in listed]
    clients = [{**c, "path": path} if no else c for c, no in zip(listed, lack, strict=True)]
    return {**values, "clients": clients}


def _values(path: Path | None, settings: Sequence[str]) -> dict[str, Any]:
    path = run_file(path or DEMO)
    values = read_mapping(path)
    values.setdefault("name", path_part(path.stem) or "run")
    values["data_root"] = str(path.parent / Path(values.get("data_root") or "").expanduser())
    for setting in settings:
        apply_setting(values, setting)
    return values


def parse(values: Mapping[str, Any]) -> RunConfig:
    """A run from plain data; raises CoterieError with the first thing that is wrong."""
    refuse_renamed(values, METHOD)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise CoterieError(sentence(error, RunConfig, values)) from error


def run_file(path: Path) -> Path:
    """The file itself; where there is none, the embedded run file of that name."""
    if path.exists() or path.name != str(path):
        return path
    shipped = DEMO.with_name(f"{path}.yaml")
    return shipped if shipped.is_file() else path


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; raises CoterieError, in one sentence, if it does not."""
    problem = "is not a mapping of keys to values"
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Once)
        if isinstance(values, dict):
            return values
    except FileNotFoundError:
        raise CoterieError(f"There is no run file {path}.") from None
    except OSError as error:
        problem = f"could not be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "is not text in UTF-8"
    except yaml.YAMLError as error:
        problem = f"is not YAML{_mark(error)}"
    raise CoterieError(f"The run file {path} {problem}.")


class _Once(yaml.SafeLoader):
    """Plain YAML, in which a key that stands twice is an error: the second would count silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.value != "<<"]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice", key.start_mark
                )
        return super().construct_mapping(node, deep)


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
    *parents, last = path.split(".")
    target = values
    for parent in parents:
        inner = target.get(parent)
        if parent in ("method", "optimiser") and isinstance(inner, str):
            inner = {"name": inner}  # what is given by its name alone has settings too
        elif inner is not None and not isinstance(inner, Mapping):
            raise CoterieError(
                f"--set {setting!r}: {parent!r} is not a mapping of keys; set it as a whole."
            )
        target[parent] = dict(inner or {})
        target = target[parent]
    try:
        target[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CoterieError(f"--set {setting!r}: the value is not YAML.") from error

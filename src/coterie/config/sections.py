"""The schema of a run file: every key, and the values that it may have.

It needs no torch, so that a mistake is told at once.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from coterie.aggregation.spec import AggregationSpec
from coterie.bases.spec import BaseSpec
from coterie.data.divide_spec import DivideSpec
from coterie.data.spec import ClientSpec, DataSpec
from coterie.evaluation.metrics import metric_named
from coterie.files import expanded
from coterie.methods.registry import POOLED, check_name
from coterie.training.spec import EvaluationSpec, TrainingSpec

METHOD = "comigs-1g1s"
"""The method of a run file that names none."""

LACKING = {
    "answers": "answers; set data.instructions for prompts with answers, or data.messages for "
    "conversations",
    "choices": "answers to choose from; set data.instructions",
    "pairs": "pairs of answers; set data.preferences",
}
"""What metrics need of the data, for errors."""
M = TypeVar("M")


class MethodSpec(BaseModel):
    """Key `method` of a run file: a method's name, or a mapping of `name` and its settings.

    The name is checked. The settings are checked by the method's class.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = METHOD

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Accept a name alone; report an unknown one before any other mistake."""
        given = values if isinstance(values, Mapping) else {"name": values}
        name = str(given.get("name", METHOD))
        check_name(name)
        return {**{str(key): value for key, value in given.items()}, "name": name}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as in the file."""
        return dict(self.model_extra or {})


class DeploymentSpec(BaseModel):
    """Section `deployment` of a run file: what a server does when clients are late or gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    anyone: bool = False
    """let any client with a key join, named or not (implied when `clients` is empty)"""
    quorum: int | None = Field(default=None, ge=1)
    """clients needed to complete a round; default: all named clients"""
    deadline: float = Field(default=3600, gt=0)
    """time limit of a round in seconds; without its quorum, a round continues"""
    share_metrics: bool = False
    """send clients' metrics (losses, scores, routing weights, times, ...) to the server; otherwise
    they stay on the clients"""
    checkpoints: int = Field(default=3, ge=1)
    """checkpoints that the server keeps, to go back to with --from-round"""
    largest_message: int = Field(default=256, ge=1)
    """maximum message size in MiB; larger messages are rejected"""


class ServerSpec(BaseModel):
    """Section `server` of a run file: it gives the server a model of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: BaseSpec | None = None
    """base of the server's own model, which any `server` section creates, even `{}`: a name, or a
    mapping as `base`; default: the run's base"""
    test: str | None = None
    """file or folder to score the server's model on; default: the held-out splits that
    divide.public sets aside (by even only)"""


def _known(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        check_name("local" if name == POOLED else name)
    return names


def _is_a_device(device: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(device, str):
        right = re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", device)
    else:
        gpus = {name for name in device if re.fullmatch(r"cuda:[0-9]{1,3}", name)}
        right = len(device) == len(gpus) > 1
    if not right:
        raise ValueError(
            "give auto, cpu, cuda, cuda:N, mps, or a list of several GPUs, such as [cuda:0, cuda:1]"
        )
    return device


def _absolute(folder: str) -> str:
    return str(expanded(folder).resolve())


class Sections(BaseModel, Generic[M]):
    """Every key of a run file; M is the type of its method."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """name of the run; default: the run file's name"""
    seed: int = Field(default=0, ge=0)
    """seed of all random draws"""
    threads: int | None = Field(default=None, ge=1)
    """number of CPU threads; default: all"""
    device: Annotated[str | tuple[str, ...], AfterValidator(_is_a_device)] = "auto"
    """where bases are computed: auto (a GPU if there is one, else the CPU), cpu, cuda, cuda:N, mps,
    or a list of GPUs to spread layers over, such as [cuda:0, cuda:1]; each client of a deployment
    decides for itself"""
    base: BaseSpec = BaseSpec(name="tiny-gpt2")
    """base model, by its name or as a mapping of the keys below"""
    bases: dict[str, BaseSpec] = {}
    """bases by client name, for clients whose base is not `base`: names, or mappings as `base`"""
    server: ServerSpec | None = None
    method: M = Field(default=METHOD, validate_default=True)
    """name of the method, or a mapping of `name` and its settings"""
    pooled: bool = False
    """train one client on all clients' text"""
    baselines: Annotated[tuple[str, ...], AfterValidator(_known)] = ()
    """methods to run first, on the same data; the run's own method is skipped"""
    rounds: int = Field(default=20, ge=1)
    """number of communication rounds"""
    data_root: Annotated[str, AfterValidator(_absolute)] = Field(default="", validate_default=True)
    """folder that relative paths start from; default: the run file's folder"""
    data: DataSpec = DataSpec()
    clients: tuple[ClientSpec, ...] = ()
    """clients and their texts; give either `clients` or `divide`"""
    divide: DivideSpec | None = None
    """one data set to divide among clients, instead of `clients`"""
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
        if not isinstance(values, Mapping) or not isinstance(values.get("data"), Mapping):
            return values
        root, data = values.get("data_root") or "", dict(values["data"])
        if not isinstance(root, str):  # it is refused later
            return values
        match data.get("instructions"):
            case {"template": str(name)} as instructions:
                from coterie.data.templates import inlined

                data["instructions"] = {**instructions, "template": inlined(name, expanded(root))}
        match data.get("chat_template"):
            case str(name) if name:
                from coterie.data.templates import inlined_chat

                data["chat_template"] = inlined_chat(name, expanded(root))
        return {**values, "data": data}

    @model_validator(mode="after")
    def _who(self) -> Self:
        if not self.clients and self.divide is None:
            raise ValueError(
                "the run has no clients; list them in `clients`, or divide a data set with `divide`"
            )
        if self.clients and self.divide is not None:
            raise ValueError("`clients` and `divide` are mutually exclusive; give one of them")
        if self.divide is not None and self.divide.public and self.data.public is not None:
            raise ValueError(
                "divide.public and data.public both define a public set; give one of them"
            )
        names = [client.name for client in self.clients]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the client name {name!r} is used twice in `clients`")
        return self

    @model_validator(mode="after")
    def _formats_agree(self) -> Self:
        own = () if self.server is None or self.server.base is None else (self.server.base,)
        if self.training.precision == "fp32" and any(
            base.weights == "bf16" for base in (self.base, *self.bases.values(), *own)
        ):
            raise ValueError(
                "training.precision is fp32, but a base's weights are to be in bf16; remove one of "
                "the two"
            )
        return self

    @model_validator(mode="after")
    def _comparisons_are_learnt(self) -> Self:
        kind = self.data.declared
        if self.training.dpo is not None and not kind.referenced:
            raise ValueError(
                "the section training.dpo has no effect without data.preferences; add that or "
                "remove training.dpo"
            )
        shared = self.server is not None or (self.divide is not None and self.divide.public)
        if kind.compares and shared:
            what = "divide.public" if self.server is None else "a server with a model of its own"
            raise ValueError(
                f"{kind.name} are learnt by clients, from their own samples; remove {what} or "
                f"{self.data.key}"
            )
        return self

    @model_validator(mode="after")
    def _can_be_measured(self) -> Self:
        name, generate = self.evaluation.metric, self.evaluation.generate
        needs = "nothing" if name is None else metric_named(name).needs
        offers = self.data.declared.offers
        for key, need in (("generate", "answers"), (f"metric: {name}", needs)):
            if (key != "generate" or generate is not None) and need not in offers:
                raise ValueError(f"evaluation.{key} needs {LACKING[need]}")
        if needs == "answers" and generate is None:
            raise ValueError(
                f"evaluation.metric: {name} scores generated answers; set evaluation.generate to "
                "their maximum number of tokens"
            )
        return self


class RunFile(Sections[MethodSpec]):
    """A validated run file, in which the method is a name with settings."""

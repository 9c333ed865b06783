"""The schema of a run file: its keys and their valid values.

This module does not import torch, so that mistakes are reported without delay.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from coterie.bases.spec import BaseSpec
from coterie.data.division.spec import DivideSpec
from coterie.data.general import SOURCES, inlined_texts
from coterie.data.spec import ClientSpec, DataSpec
from coterie.evaluation.metrics import metric_named
from coterie.exchanges.spec import AggregationSpec
from coterie.files import expanded
from coterie.methods.registry import POOLED, check_name
from coterie.names import RunName, check_distinct
from coterie.registry import NamedSpec, Section
from coterie.training.spec import EvaluationSpec, TrainingSpec

METHOD = "auto"
"""The default method."""

REQUIREMENTS = {
    "answers": "answers; set data.instructions for prompts with answers, or data.messages for "
    "conversations",
    "choices": "answers to choose from; set data.instructions",
    "pairs": "pairs of answers; set data.preferences",
}
"""Parts of error messages: what a metric needs, and which setting provides it."""
M = TypeVar("M")


class MethodSpec(NamedSpec):
    """Key `method` of a run file: a method's name, or a mapping of `name` and settings.

    This model checks the name. The method's class checks the settings.
    """

    name: str = METHOD

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, values: Any) -> Any:
        """Convert a method's name to a mapping; report an unknown name before any other mistake."""
        mapping = values if isinstance(values, Mapping) else {"name": values}
        name = str(mapping.get("name", METHOD))
        check_name(name)
        return {**{str(key): value for key, value in mapping.items()}, "name": name}


class DeploymentSpec(Section):
    """Section `deployment` of a run file: admission, quorum and limits of a server."""

    anyone: bool = False
    """whether any client with a key may join, even if `clients` does not list it; implied if
    `clients` is empty"""
    quorum: int | None = Field(default=None, ge=1)
    """number of clients needed to complete a round; default: all clients that `clients` lists"""
    deadline: float = Field(default=3600, gt=0)
    """time limit of a round in seconds; a round without a quorum continues after this limit"""
    share_metrics: bool = False
    """whether clients send their metrics (losses, scores, routing weights, times, ...) to the
    server; otherwise, metrics stay on the clients"""
    checkpoints: int = Field(default=3, ge=1)
    """number of exchanges whose checkpoints the server keeps; --from-round can resume from them"""
    largest_message: int = Field(default=256, ge=1)
    """maximum size of an upload in MiB; a run whose uploads may be larger is refused"""


class CheckpointSpec(Section):
    """Section `checkpoint` of a run file."""

    every: int = Field(default=1, ge=1)
    """number of rounds between checkpoints, from which an interrupted run continues; a checkpoint
    is always written at the end; does not affect results; a deployment accepts only 1"""


class ServerSpec(Section):
    """Section `server` of a run file, which gives the server its own model."""

    base: BaseSpec | None = None
    """base of the server's own model: a name, or a mapping as in `base`; default: the run's base;
    an empty section, `server: {}`, is enough to give the server a model"""
    test: str | None = None
    """file or folder of the text that the server's model is scored on; default: held-out splits of
    the public set (`divide.by: even` with divide.public only)"""


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        check_name("local" if name == POOLED else name)
    return names


def _check_device(device: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(device, str):
        valid = re.fullmatch(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", device)
    else:
        gpus = {name for name in device if re.fullmatch(r"cuda:[0-9]{1,3}", name)}
        valid = len(device) == len(gpus) > 1
    if not valid:
        raise ValueError(
            "give auto, cpu, cuda, cuda:N, mps, or a list of several GPUs, such as [cuda:0, cuda:1]"
        )
    return device


def _absolute(folder: str) -> str:
    return str(expanded(folder).resolve())


class Sections(Section, Generic[M]):
    """The sections and all other top-level keys of a run file.

    The type variable M is the type of the value of the key `method`: `MethodSpec` in a `RunFile`,
    and `Method` in a `RunConfig`.
    """

    name: RunName = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """name of the run; default: name of the run file, without its extension"""
    seed: int = Field(default=0, ge=0)
    """seed of all random draws"""
    threads: int | None = Field(default=None, ge=1)
    """number of CPU threads; default: chosen by PyTorch, usually one per core"""
    device: Annotated[str | tuple[str, ...], AfterValidator(_check_device)] = "auto"
    """device that bases run on: auto (a GPU if PyTorch finds one, else the CPU), cpu, cuda,
    cuda:N, mps, or a list of GPUs to distribute layers over, such as [cuda:0, cuda:1]; clients of
    a deployment choose their own device"""
    base: BaseSpec = BaseSpec(name="tiny-gpt2")
    """base model: a name, or a mapping of the keys below"""
    bases: dict[str, BaseSpec] = Field(default={})
    """bases of clients that do not use `base`: a mapping from a client's name to a base, which is
    a name, or a mapping as in `base`"""
    server: ServerSpec | None = None
    method: M = Field(default=METHOD, validate_default=True)
    """method: a name, or a mapping of `name` and the method's settings"""
    pooled: bool = False
    """whether to train a single client on the texts of all clients"""
    baselines: Annotated[tuple[str, ...], AfterValidator(_check_names)] = ()
    """names of methods to run before the run's own method, on the same data; the run's own method
    is skipped if it is listed"""
    rounds: int = Field(default=20, ge=1)
    """number of communication rounds"""
    data_root: Annotated[str, AfterValidator(_absolute)] = Field(default="", validate_default=True)
    """folder that relative paths start from; default: folder of the run file"""
    data: DataSpec = DataSpec()
    clients: tuple[ClientSpec, ...] = ()
    """list of clients and their texts; required unless `divide` is given"""
    divide: DivideSpec | None = None
    """data set to divide among clients; replaces `clients`"""
    training: TrainingSpec = TrainingSpec()
    aggregation: AggregationSpec = AggregationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """programs that also receive the metrics of the run and its baselines: tensorboard, wandb;
    ignored in a deployment"""
    deployment: DeploymentSpec = DeploymentSpec()

    @model_validator(mode="before")
    @classmethod
    def _expand_centralized(cls, values: Any) -> Any:
        """Replace the method `centralized` with local training of one client that has all texts."""
        if isinstance(values, Mapping):
            method = values.get("method")
            spec = method if isinstance(method, Mapping) else {"name": method}
            if spec.get("name") == POOLED:
                return {**values, "method": {**spec, "name": "local"}, "pooled": True}
        return values

    @model_validator(mode="before")
    @classmethod
    def _place_adapter(cls, values: Any) -> Any:
        """Move the key `adapter` into the section `base`."""
        if not isinstance(values, Mapping) or "adapter" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "adapter"}
        base = rest.get("base", cls.model_fields["base"].default)
        section = {"name": base} if isinstance(base, str) else base
        if not isinstance(section, Mapping | BaseSpec):
            return rest  # validation of the fields rejects it
        section = dict(section)
        if section.get("adapter") not in (None, values["adapter"]):
            raise ValueError("`adapter` and `base.adapter` contradict; remove one of the two")
        return {**rest, "base": {**section, "adapter": values["adapter"]}}

    @model_validator(mode="before")
    @classmethod
    def _inline_files(cls, values: Any) -> Any:
        """Replace the path of any template file by the content of the file.

        A run file can name files for the prompt template, the chat template and the texts for
        replay. Clients of a deployment need the contents, because they do not have the files.
        """
        if not isinstance(values, Mapping):
            return values
        root = values.get("data_root") or ""
        if not isinstance(root, str):  # validation of the fields rejects it
            return values
        match values.get("training"):
            case {"replay": {"text": str(name)} as replay} as training if name not in SOURCES:
                replay = {**replay, "text": inlined_texts(name, expanded(root))}
                values = {**values, "training": {**training, "replay": replay}}
        if not isinstance(values.get("data"), Mapping):
            return values
        data = dict(values["data"])
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
    def _check_clients(self) -> Self:
        if not self.clients and self.divide is None:
            raise ValueError(
                "the run has no clients; list them in `clients`, or divide a data set with `divide`"
            )
        if self.clients and self.divide is not None:
            raise ValueError("`clients` and `divide` are mutually exclusive; remove one of them")
        if self.divide is not None and self.divide.public and self.data.public is not None:
            raise ValueError(
                "`divide.public` and `data.public` both define a public set; remove one of them"
            )
        check_distinct((client.name for client in self.clients), "clients")
        return self

    @property
    def all_bases(self) -> tuple[BaseSpec, ...]:
        """The bases that the run file names: the run's, single clients', and the server's."""
        server = () if self.server is None or self.server.base is None else (self.server.base,)
        return self.base, *self.bases.values(), *server

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.training.precision == "fp32" and any(b.weights == "bf16" for b in self.all_bases):
            raise ValueError(
                "`training.precision: fp32` contradicts `weights: bf16` of a base; remove one "
                "of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_comparisons(self) -> Self:
        kind = self.data.declared
        if self.training.dpo is not None and not kind.referenced:
            raise ValueError(
                "`training.dpo` has no effect without data.preferences; set data.preferences "
                "or remove training.dpo"
            )
        shared = self.server is not None or (self.divide is not None and self.divide.public)
        if kind.compares and shared:
            key = "divide.public" if self.server is None else "server"
            raise ValueError(
                f"`{self.data.key}` and `{key}` are mutually exclusive: clients' data can contain "
                f"{kind.name}, but public data and the server's data cannot; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_metric(self) -> Self:
        name, generate = self.evaluation.metric, self.evaluation.generate
        needs = "nothing" if name is None else metric_named(name).needs
        offers = self.data.declared.offers
        for key, need in (("generate", "answers"), (f"metric: {name}", needs)):
            if (key != "generate" or generate is not None) and need not in offers:
                raise ValueError(f"`evaluation.{key}` needs {REQUIREMENTS[need]}")
        if self.evaluation.questions and not (self.data.instructions or self.data.messages):
            raise ValueError(f"`evaluation.questions` needs {REQUIREMENTS['answers']}")
        if needs == "answers" and generate is None:
            raise ValueError(
                f"`evaluation.metric: {name}` scores generated answers; set evaluation.generate to "
                "the maximum number of tokens of an answer"
            )
        return self


class RunFile(Sections[MethodSpec]):
    """A validated run file whose method is a name with settings that are not checked yet."""

"""A run: a run file whose method is bound to its class."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from pydantic import field_serializer

from coterie.aggregation.defaults import with_defaults
from coterie.aggregation.mean import Aggregation
from coterie.aggregation.registry import TRANSFORMS
from coterie.aggregation.spec import TransformSpec
from coterie.aggregation.transform import TRAIN, Transform, run_hook
from coterie.bases.spec import BaseSpec
from coterie.config.errors import validated
from coterie.config.plugins import plugins_of, version_of
from coterie.config.sections import RunFile, Sections
from coterie.evaluation.metrics import METRICS
from coterie.methods.contract import SERVER, Method
from coterie.methods.registry import POOLED, carried, kind_of
from coterie.privacy.ledger import Budget
from coterie.training import optimiser
from coterie.training.spec import TrainingSpec

NOT_IN_DIGEST = ("name", "baselines", "deployment", "device")
NOT_TOLD = ("clients", "divide", "data_root", "baselines", "bases", "server", "device")
"""What a client of a deployment learns nothing of: others' names, paths and devices."""


class RunConfig(Sections[Method]):
    """A run file whose method is bound to its class; `parse` and `resolve` make it."""

    @field_serializer("method")
    def _described(self, method: Method) -> dict[str, Any]:
        return method.described()

    @property
    def label(self) -> str:
        """The method's name for tables."""
        return POOLED if self.pooled else self.method.name

    @property
    def root(self) -> Path:
        """Where relative paths start."""
        return Path(self.data_root)

    @property
    def exchanges(self) -> int:
        """Downloads and uploads of the whole run: one a round, unless the method has others."""
        return self.method.exchanges(self.rounds) * len(self.phases)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The aggregation transforms that the run file lists."""
        return cast("tuple[Transform, ...]", self.aggregation.transforms)

    @property
    def every_transform(self) -> tuple[Transform, ...]:
        """The listed transforms, and those that other keys of `aggregation` name."""
        return with_defaults(self.aggregation, self.transforms, self.method.schema())

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of a round, an exchange each: those that transforms need, then training."""
        return (*(phase for transform in self.transforms for phase in transform.before), TRAIN)

    def turn(self, exchange: int) -> tuple[int, str]:
        """Return the method's exchange, and the phase, in an exchange of the run."""
        number, phase = divmod(exchange, len(self.phases))
        return number, self.phases[phase]

    def aggregating(self) -> Aggregation:
        """Return the way of this run's uploads to their mean."""
        exchanges = self.method.exchanges(self.rounds)
        return Aggregation(self.method.schema(), self.every_transform, exchanges)

    @property
    def budgets(self) -> list[Budget]:
        """What the run spends of a client's privacy budget, by what is sent under noise."""
        exchanges = self.method.exchanges(self.rounds)
        budgets = (run_hook(transform, "budget", exchanges) for transform in self.transforms)
        return [budget for budget in (self.method.budget, *budgets) if budget is not None]

    def base_of(self, name: str) -> BaseSpec:
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

    def with_method(self, method: str | Method) -> "RunConfig":
        """The same run with another method, and without baselines.

        The run's own method keeps its settings, and so does an object. To others, given by their
        names, a part that was changed (`mlp`, `attention`, ...) is carried over, so that a rank
        means the same. Without means there is no server optimiser.
        """
        if method == self.label:
            return self.model_copy(update={"baselines": ()})
        if isinstance(method, str):
            kind = kind_of("local" if method == POOLED else method)
            chosen = validated(kind, carried(self.method, kind), ("method",))
        else:
            chosen = method
        run = {"method": chosen, "pooled": method == POOLED, "baselines": ()}
        if not chosen.schema().reduced("mean"):
            none = {"optimiser": None, "transforms": ()}
            run["aggregation"] = self.aggregation.model_copy(update=none)
        return self.model_copy(update=run)

    def as_dict(self) -> dict[str, Any]:
        """As plain data, every default filled in."""
        return self.model_dump(mode="json")

    @property
    def objects(self) -> list[type[Any]]:
        """The classes that the run uses by name, first its method's; without its baselines."""
        metrics = [METRICS.get(name) for name in (self.evaluation.metric,) if name]
        return [type(self.method), *map(type, self.transforms), *metrics]

    @property
    def plugins(self) -> dict[str, dict[str, str]]:
        """The plugins that its objects are from: file and hash; see `plugins_of`."""
        baselines = [kind_of(name) for name in self.baselines if name != POOLED]
        found = plugins_of([*self.objects, *baselines])
        return {name: plugin._asdict() for name, plugin in found.items()}

    def told_to(self, client: str) -> dict[str, Any]:
        """As a client of a deployment may know it: without names, paths, bases and limits of
        others."""
        values = {key: value for key, value in self.as_dict().items() if key not in NOT_TOLD}
        training = self.training_of(client).model_dump(mode="json")
        data = self.data.of(client).model_dump(mode="json") | {"public": None}
        base = self.base_of(client).model_dump()
        return {**values, "base": base, "training": training, "data": data}

    def digest(self) -> str:
        """A hash of everything that can change the result, data files' contents apart."""
        what = {k: v for k, v in self.as_dict().items() if k not in NOT_IN_DIGEST}
        if version := version_of(type(self.method)):
            what["version"] = version
        if others := {kind.name: v for kind in self.objects[1:] if (v := version_of(kind))}:
            what["versions"] = others
        canonical = json.dumps(what, sort_keys=True)
        return blake2b(canonical.encode(), digest_size=8).hexdigest()


def resolve(file: RunFile, method: Method | None = None) -> RunConfig:
    """Bind the method of a validated run file to its class, which takes its settings.

    Args:
        file: the run file.
        method: a method that replaces the file's, and need not be registered.

    Raises:
        CoterieError: if the method or the optimiser does not take its settings.
    """
    if method is None:
        method = validated(kind_of(file.method.name), file.method.settings, ("method",))
    optimiser.check(file.training.optimiser)
    transforms = [
        validated(TRANSFORMS.get(spec.name), spec.settings, ("aggregation", "transforms", number))
        if isinstance(spec, TransformSpec)
        else spec
        for number, spec in enumerate(file.aggregation.transforms)
    ]
    aggregation = file.aggregation.model_copy(update={"transforms": tuple(transforms)})
    return RunConfig.model_construct(**{**dict(file), "method": method, "aggregation": aggregation})


def parse(values: Mapping[str, Any]) -> RunConfig:
    """Return a run from plain data.

    Args:
        values: the keys of a run file. The method may be an object, whose class need not be
            registered.

    Raises:
        CoterieError: naming the first mistake.
    """
    method = values.get("method")
    if not isinstance(method, Method):
        return resolve(validated(RunFile, values))
    rest = {key: value for key, value in values.items() if key != "method"}
    return resolve(validated(RunFile, rest), method)

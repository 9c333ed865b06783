"""The configuration of a run: a run file whose method is an object of the method's class."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from pydantic import field_serializer

from coterie.aggregation.defaults import with_defaults
from coterie.aggregation.hooks import run_hook
from coterie.aggregation.mean import Aggregation
from coterie.aggregation.registry import TRANSFORMS
from coterie.aggregation.spec import TransformSpec
from coterie.aggregation.transform import TRAIN, Transform
from coterie.bases.lora import lora_digest
from coterie.bases.spec import BaseSpec
from coterie.config.errors import validated
from coterie.config.plugins import plugins_of, version_of
from coterie.config.sections import RunFile, Sections
from coterie.data.kind import DATA_KINDS
from coterie.data.spec import KindSpec
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS, Metric
from coterie.files import expanded
from coterie.methods.contract import SERVER, Method
from coterie.methods.registry import POOLED, carried, kind_of
from coterie.privacy.ledger import Budget
from coterie.training import optimiser
from coterie.training.spec import TrainingSpec

NOT_IN_DIGEST = ("name", "baselines", "deployment", "device", "trackers")
"""Keys that do not affect the results of a run."""
HIDDEN_KEYS = (
    *("clients", "divide", "data_root", "baselines", "bases", "server", "device", "trackers"),
)
"""Keys that the clients of a deployment do not receive, such as other clients' names and paths."""


class RunConfig(Sections[Method]):
    """The contents of a run file, with an instance of the method's class as the method.

    In a `RunFile`, the method is only a name with settings. The functions `parse` and `resolve`
    create a `RunConfig`.
    """

    @field_serializer("method")
    def _serialise_method(self, method: Method) -> dict[str, Any]:
        return method.described()

    @property
    def label(self) -> str:
        """The name that tables show for the method."""
        return POOLED if self.pooled else self.method.name

    @property
    def root(self) -> Path:
        """The folder that the relative paths in the run file start from."""
        return Path(self.data_root)

    @property
    def exchanges(self) -> int:
        """The number of exchanges in the whole run, including those that transforms add."""
        return self.method.exchanges(self.rounds) * len(self.phases)

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The aggregation transforms that the run file lists."""
        return cast("tuple[Transform, ...]", self.aggregation.transforms)

    @property
    def every_transform(self) -> tuple[Transform, ...]:
        """All transforms of the run.

        These are the transforms in the list `aggregation.transforms`, followed by the transforms
        that other keys of `aggregation` configure.
        """
        return with_defaults(self.aggregation, self.transforms, self.method.schema())

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of one exchange of the method, in order.

        The phases that transforms add come first, and training is the last phase. Each phase has
        its own download and upload, so the run counts each phase as an exchange of its own.
        """
        return (*(phase for transform in self.transforms for phase in transform.before), TRAIN)

    def turn(self, exchange: int) -> tuple[int, str]:
        """Find the method's exchange, and the phase within it, for an exchange of the run.

        The method and the run count exchanges differently. An exchange of the method consists of
        one or more phases. The run counts each of these phases as a separate exchange; see
        `phases`.

        Args:
            exchange: The number of the run's exchange, counted from 0.

        Returns:
            A pair. The first item is the number of the method's exchange, counted from 0. The
            second item is the name of the phase.
        """
        number, phase = divmod(exchange, len(self.phases))
        return number, self.phases[phase]

    def aggregating(self) -> Aggregation:
        """Create the object that aggregates this run's uploads.

        Returns:
            An aggregation that computes the mean of each field that the method reduces by `mean`,
            and applies the run's transforms.
        """
        exchanges = self.method.exchanges(self.rounds)
        least_others = self.aggregation.least_others
        return Aggregation(self.method.schema(), self.every_transform, exchanges, least_others)

    @property
    def budgets(self) -> list[Budget]:
        """A list with one privacy budget for each noise mechanism of the run.

        The noise mechanisms are those of the transforms and, if the method itself adds noise, the
        method's noise mechanism. The run spends all of these budgets on every client.
        """
        exchanges = self.method.exchanges(self.rounds)
        budgets = (run_hook(transform, "budget", exchanges) for transform in self.transforms)
        return [budget for budget in (self.method.budget, *budgets) if budget is not None]

    def base_of(self, name: str) -> BaseSpec:
        """Return the base of a client or of the server.

        Args:
            name: The client's name, or `server` for a server with a model of its own.

        Returns:
            The base's name and format.
        """
        name = self._model_owner(name)
        if name == SERVER and self.server is not None:
            return self.server.base or self.base
        return self.base if self.pooled else self.bases.get(name, self.base)

    def adapters(self) -> dict[str, dict[str, str]]:
        """Hash the existing LoRA adapters that the run merges into its bases.

        Returns:
            A mapping with the hash of each adapter's files, by the adapter's folder, under the key
            `adapters`; an empty mapping if the run has no such adapter.

        Raises:
            CoterieError: A folder contains no LoRA adapter.
        """
        server = () if self.server is None or self.server.base is None else (self.server.base,)
        paths = {spec.adapter for spec in (self.base, *self.bases.values(), *server)}
        folders = sorted(path for path in paths if path is not None)
        digests = {path: lora_digest(self.root / expanded(path)) for path in folders}
        return {"adapters": digests} if digests else {}

    def training_of(self, name: str) -> TrainingSpec:
        """Return the training settings of a client or of the server.

        Args:
            name: The client's name, or `server` for a server with a model of its own.

        Returns:
            The run's settings. If the run file gives the client a learning rate of its own, this
            learning rate replaces the run's learning rate; see `TrainingSpec.of`.
        """
        return self.training.of(self._model_owner(name))

    def _model_owner(self, name: str) -> str:
        """Return the name of the client or server that owns the model of a client.

        Usually, a client owns its model. If the run trains one client on the texts of all clients
        (`pooled`), and the server has a model, this client trains the server's model.
        """
        return SERVER if self.pooled and self.server is not None else name

    def with_method(self, method: str | Method) -> "RunConfig":
        """Return a copy of the run with another method and without baselines.

        If the new method averages no field over clients, the copy has neither a server optimiser
        nor transforms.

        Args:
            method: A method with its settings, or a method's name. If it is the name of the run's
                own method, the settings remain unchanged. If it is the name of another method,
                sections of settings (`mlp`, `attention`, ...) are copied from the run's own method
                to the other method. Only sections that both methods have, and in which the run's
                own method differs from its defaults, are copied.

        Returns:
            The copy.

        Raises:
            CoterieError: There is no such method, or it does not accept the settings.
        """
        if method == self.label:
            return self.model_copy(update={"baselines": ()})
        if isinstance(method, str):
            kind = kind_of("local" if method == POOLED else method)
            chosen = validated(kind, carried(self.method, kind), ("method",))
        else:
            chosen = method
        run = {"method": chosen, "pooled": method == POOLED, "baselines": ()}
        if not chosen.schema().averaged:
            none = {"optimiser": None, "transforms": ()}
            run["aggregation"] = self.aggregation.model_copy(update=none)
        return self.model_copy(update=run)

    def as_dict(self) -> dict[str, Any]:
        """Return the run as plain data.

        Returns:
            The keys of a run file with JSON values, including all defaults.
        """
        return self.model_dump(mode="json")

    @property
    def objects(self) -> list[type[Any]]:
        """The registered classes that the run uses: its method, transforms, metric and data kind.

        The methods of the run's baselines are not included.
        """
        metrics = [METRICS.get(name) for name in (self.evaluation.metric,) if name]
        kinds = [] if self.data.kind is None else [self.data.declared]
        return [type(self.method), *map(type, self.transforms), *metrics, *kinds]

    @property
    def plugins(self) -> dict[str, dict[str, str]]:
        """The file and hash of each plugin that the run or a baseline uses.

        The keys are the same as in the result of `plugins_of`.
        """
        baselines = [kind_of(name) for name in self.baselines if name != POOLED]
        plugins = plugins_of([*self.objects, *baselines])
        return {name: plugin._asdict() for name, plugin in plugins.items()}

    def visible_to(self, client: str) -> dict[str, Any]:
        """Return the run as plain data for one client of a deployment.

        The names, paths, bases, learning rates and limits of other clients are left out.

        Args:
            client: The client's name.

        Returns:
            The keys of a run file with JSON values.
        """
        values = {key: value for key, value in self.as_dict().items() if key not in HIDDEN_KEYS}
        training = self.training_of(client).model_dump(mode="json")
        data = self.data.of(client).model_dump(mode="json") | {"public": None}
        base = self.base_of(client).model_dump()
        return {**values, "base": base, "training": training, "data": data}

    def digest(self) -> str:
        """Hash everything that affects the results, except for the texts.

        Returns:
            A hexadecimal hash of 16 digits.
        """
        hashed = {k: v for k, v in self.as_dict().items() if k not in NOT_IN_DIGEST}
        hashed["evaluation"].pop("questions", None)
        if version := version_of(type(self.method)):
            hashed["version"] = version
        if versions := {kind.name: v for kind in self.objects[1:] if (v := version_of(kind))}:
            hashed["versions"] = versions
        canonical = json.dumps(hashed, sort_keys=True)
        return blake2b(canonical.encode(), digest_size=8).hexdigest()


def resolve(file: RunFile, method: Method | None = None) -> RunConfig:
    """Bind the method and transforms of a run file to their classes, which check the settings.

    Args:
        file: The run file.
        method: A method that replaces the run file's method. The class of this method need not be
            registered. None: the run file's method is used.

    Raises:
        CoterieError: The settings of the method, the optimiser or a transform are invalid.
    """
    if method is None:
        method = validated(kind_of(file.method.name), file.method.settings, ("method",))
    optimiser.check(file.training.optimiser)
    transforms = [
        validated(TRANSFORMS.get(spec.name), spec.settings, ("aggregation", "transforms", number))
        if isinstance(spec, TransformSpec)
        else _transform(spec)
        for number, spec in enumerate(file.aggregation.transforms)
    ]
    sections: dict[str, Any] = {
        "method": method,
        "aggregation": file.aggregation.model_copy(update={"transforms": tuple(transforms)}),
    }
    if isinstance(given := file.data.kind, KindSpec):
        kind = validated(DATA_KINDS.get(given.name), given.settings, ("data", "kind"))
        sections["data"] = file.data.model_copy(update={"kind": kind})
    return RunConfig.model_construct(**dict(file) | sections)


def _transform(value: object) -> Transform:
    if not isinstance(value, Transform):
        raise CoterieError(f"aggregation.transforms: {value!r} is not a transform.")
    return value


def parse(values: Mapping[str, Any]) -> RunConfig:
    """Create a run from the plain data of a run file.

    Args:
        values: The data of a run file. The values of `method`, of `evaluation.metric` and of the
            items of `aggregation.transforms` may also be objects. The class of a method or
            transform that is given as an object need not be registered. If a metric is given as an
            object, this function registers the metric's class if necessary, because scores and
            tables look up metrics by name.

    Raises:
        CoterieError: The data are invalid; the message names the first mistake.
    """
    method, evaluation = values.get("method"), values.get("evaluation")
    if isinstance(evaluation, Mapping) and isinstance(evaluation.get("metric"), Metric):
        metric = type(evaluation["metric"])
        if not METRICS.is_installed(metric):
            METRICS.accept(metric)  # scores and tables look up metrics by name
        values = {**values, "evaluation": {**evaluation, "metric": metric.name}}
    if not isinstance(method, Method):
        return resolve(validated(RunFile, values))
    rest = {key: value for key, value in values.items() if key != "method"}
    return resolve(validated(RunFile, rest), method)

"""The configuration of a run: a run file whose method is an object of the method's class."""

import json
from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import field_serializer

from coterie.bases.devices import device_type
from coterie.bases.precision import Precision, fast_precision
from coterie.bases.spec import BaseSpec
from coterie.config.errors import validated
from coterie.config.plugins import plugins_of, version_of
from coterie.config.sections import RunFile, Sections
from coterie.data.general import list_digest
from coterie.data.kind import DATA_KINDS
from coterie.data.spec import KindSpec
from coterie.errors import CoterieError
from coterie.evaluation.metrics import METRICS, Metric
from coterie.exchanges.spec import TransformSpec
from coterie.methods.contract import SERVER, Method
from coterie.methods.registry import POOLED, carried, kind_of
from coterie.training import optimiser
from coterie.training.spec import ReplaySpec, TrainingSpec
from coterie.transforms.contract import Transform
from coterie.transforms.registry import TRANSFORMS
from coterie.turn import TRAIN, Turn

NOT_IN_DIGEST = ("name", "baselines", "checkpoint", "deployment", "device", "trackers")
"""Keys that do not affect the results of a run."""
HIDDEN_KEYS = (
    *("clients", "divide", "data_root", "baselines", "bases", "server", "checkpoint", "device"),
    "trackers",
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
        """The number of the method's exchanges in the whole run."""
        return self.method.exchanges(self.rounds)

    @property
    def precision(self) -> Precision:
        """The precision of computations, which `resolve` determines if the run file does not."""
        assert self.training.precision is not None, "resolve() sets it"
        return self.training.precision

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """The aggregation transforms that the run file lists."""
        return cast("tuple[Transform, ...]", self.aggregation.transforms)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of one exchange of the method, in order.

        Training is one of the phases; transforms add the others. Each phase has its own download
        and upload.
        """
        before = (phase for transform in self.transforms for phase in transform.before)
        after = (phase for transform in self.transforms for phase in transform.after)
        return (*before, TRAIN, *after)

    @property
    def turns(self) -> int:
        """The number of turns in the whole run."""
        return self.exchanges * len(self.phases)

    def turn(self, number: int) -> Turn:
        """Return a turn of the run.

        Args:
            number: The number of the turn, counted from 0. If it is the number of turns of the
                run, the result is the turn that would follow the last round.

        Returns:
            The turn, with the numbers of its round and of its exchange.
        """
        phases = self.phases
        exchange, phase = divmod(number, len(phases))
        until = self.method.exchanges
        round = bisect_right(range(1, self.rounds + 1), exchange, key=until)
        return Turn(
            round,
            exchange,
            number,
            phases[phase],
            first=exchange == (until(round) if round else 0),
            last=exchange + 1 == until(round + 1),
            after=phase > phases.index(TRAIN),
            closes=phase + 1 == len(phases),
        )

    def counts(self, accepted: int | None, number: int) -> bool:
        """Return whether a client's last upload before a turn was accepted.

        Phases after training do not matter: the upload was accepted before.

        Args:
            accepted: The number of the client's last turn that was accepted, if there is one.
            number: The number of the turn.

        Returns:
            Whether the server has accepted it.
        """
        while number and self.turn(number - 1).after:
            number -= 1
        return accepted is not None and accepted + 1 >= number

    def turns_in(self, rounds: int) -> int:
        """Return the number of turns in the first rounds of the run.

        Args:
            rounds: A number of rounds, at most that of the run.

        Returns:
            The number of turns; 0 without rounds.
        """
        return self.method.exchanges(rounds) * len(self.phases) if rounds else 0

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
    training: dict[str, Any] = {"replay": _replay(file)}
    if file.training.precision is None:
        stored = any(base.weights == "bf16" for base in file.all_bases)
        training["precision"] = "bf16" if stored else fast_precision(device_type(file.device))
    sections["training"] = file.training.model_copy(update=training)
    if isinstance(given := file.data.kind, KindSpec):
        kind = validated(DATA_KINDS.get(given.name), given.settings, ("data", "kind"))
        sections["data"] = file.data.model_copy(update={"kind": kind})
    return RunConfig.model_construct(**dict(file) | sections)


def _replay(file: RunFile) -> ReplaySpec | Literal[False]:
    """Return the settings of replay, with the hash of the list if it is used."""
    replay = file.training.replay
    if isinstance(replay, ReplaySpec) and replay.text == "list" and replay.digest is None:
        replay = replay.model_copy(update={"digest": list_digest()})
    return replay


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
            METRICS.register(metric)  # scores and tables look up metrics by name
        values = {**values, "evaluation": {**evaluation, "metric": metric.name}}
    if not isinstance(method, Method):
        return resolve(validated(RunFile, values))
    rest = {key: value for key, value in values.items() if key != "method"}
    return resolve(validated(RunFile, rest), method)

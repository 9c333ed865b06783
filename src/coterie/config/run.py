"""One validated description of a run."""

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    SerializeAsAny,
    field_serializer,
    field_validator,
    model_validator,
)

from coterie.bases.spec import BaseSpec
from coterie.config.errors import validated
from coterie.config.plugins import plugins_of, version_of
from coterie.config.sections import METHOD, Sections
from coterie.methods.contract import SERVER, Method
from coterie.methods.registry import POOLED, carried, kind_of, method_from
from coterie.training import optimiser
from coterie.training.spec import TrainingSpec

NOT_IN_DIGEST = ("name", "baselines", "deployment", "device")
NOT_TOLD = ("clients", "divide", "data_root", "baselines", "bases", "server", "device")
"""What a client of a deployment learns nothing of: others' names, paths and devices."""


class RunConfig(Sections):
    """A run file."""

    method: SerializeAsAny[Method] = Field(
        default_factory=lambda: method_from(METHOD),
        description="name of the method, or a mapping of `name` and its settings",
    )

    @field_validator("method", mode="before")
    @classmethod
    def _method(cls, value: Any) -> Method:
        return method_from({"name": METHOD, **value} if isinstance(value, dict) else value)

    @field_serializer("method")
    def _described(self, method: Method) -> dict[str, Any]:
        return method.described()

    @model_validator(mode="after")
    def _can_be_updated(self) -> Self:
        optimiser.check(self.training.optimiser)
        return self

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
        return self.method.exchanges(self.rounds)

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
        chosen: Any = method
        if isinstance(method, str):
            kind = kind_of("local" if method == POOLED else method)
            chosen = {"name": method, **carried(self.method, kind)}
        run = {**self.as_dict(), "method": chosen, "pooled": False, "baselines": []}
        other = parse(run)
        if other.method.schema().reduced("mean"):
            return other
        return parse({**run, "aggregation": {**run["aggregation"], "optimiser": None}})

    def as_dict(self) -> dict[str, Any]:
        """As plain data, every default filled in."""
        return self.model_dump(mode="json")

    @property
    def plugins(self) -> dict[str, dict[str, str]]:
        """The plugins that its methods are from: file and hash, by the method's name."""
        baselines = (kind_of(name) for name in self.baselines if name != POOLED)
        return plugins_of([type(self.method), *baselines])

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
        canonical = json.dumps(what, sort_keys=True)
        return blake2b(canonical.encode(), digest_size=8).hexdigest()


def parse(values: Mapping[str, Any]) -> RunConfig:
    """A run from plain data; raises CoterieError with the first thing that is wrong."""
    return validated(RunConfig, values, METHOD)
